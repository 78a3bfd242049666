"""Makes the W&B dashboard of a project: curves of learning, halting, evaluation, throughput and machines.

python -m report.dashboard --project sudoku --entity my-team
python -m report.dashboard --project sudoku --dry-run
"""

import argparse
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from config.architecture import architectures
from dataset.build.command_line import OneLineParser, one_line_errors
from models import own_metrics
from training.wandb import PICTURES, has_wandb_login

if TYPE_CHECKING:
    from wandb_workspaces.workspaces import Workspace


class Curves(NamedTuple):
    """A panel of curves: of all metrics whose whole name matches the regular expression."""

    title: str
    metrics: str
    has_log_scale: bool = False


# What the panels show; docs/metrics.md tells what the metrics mean.
SECTIONS = {
    "learning": (
        Curves("loss", "train/lm_loss", has_log_scale=True),
        Curves("cells right, at halting", "train/accuracy"),
        Curves("puzzles right, at halting and after one step", "train/exact_accuracy(_after_step_1)?"),
        Curves("gradient norm", "train/grad_norm", has_log_scale=True),
        Curves("learning rates", "train/(puzzle_emb_)?lr"),
    ),
    "halting": (
        Curves("steps until halting", "train/steps"),
        Curves("halting loss", "train/q_(halt|continue)_loss", has_log_scale=True),
        Curves("Q head knows whether it is right", "(train|eval/[^/]+)/q_halt_accuracy"),
        Curves("steps, if the Q head halted", "eval/[^/]+/act_steps"),
        Curves("puzzles right, if the Q head halted", "eval/[^/]+/act_exact_accuracy"),
    ),
    "evaluation": (
        Curves("puzzles right", "(eval|eval_raw|validation)/[^/]+/exact_accuracy"),
        Curves("by the rules of the puzzle", "eval/[^/]+/[a-z]+/((valid|shortest)_accuracy|pass@[12])"),
        Curves("cells right", "(eval|eval_raw|validation)/[^/]+/accuracy"),
        Curves("loss", "(eval|eval_raw|validation)/[^/]+/lm_loss", has_log_scale=True),
        Curves("best so far", "best/[a-z_]*(accuracy|loss)"),
    ),
    "throughput": (
        Curves("examples per second", "train/examples_per_second"),
        Curves("seconds of a step", "train/step_seconds"),
        Curves("seconds of a step waiting for data", "train/data_wait_seconds"),
        Curves("seconds of a step waiting for other ranks", "train/sync_seconds"),
        Curves("seconds waiting for checkpoints", "train/checkpoint_stall_seconds"),
    ),
    "machines": (
        Curves("memory", "train/peak_memory_bytes"),
        Curves(
            "seconds of computing, slowest and fastest rank", "train/compute_seconds_(slowest|fastest)_rank"
        ),
        Curves("slowest rank", "train/slowest_rank"),
    ),
}
_OWN = {arch: own_metrics(arch) for arch in architectures()}
if any(_OWN.values()):
    SECTIONS["of one model"] = tuple(
        Curves(f"{arch}: {name}", f"(train|eval/[^/]+)/{name}")
        for arch, names in _OWN.items()
        for name in names
    )
_PICTURES_IN = "evaluation"
_COLUMNS = ("best/exact_accuracy", "best/step")  # of the table of runs, beside their names


def main(arguments: Sequence[str] | None = None) -> None:
    with one_line_errors("dashboard"):
        options = _parse_options(arguments)
        workspace = build_workspace(options.project, name=options.name, entity=options.entity or "")
        if options.dry_run:
            print(_outline(workspace))
        else:
            _save(workspace)


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = OneLineParser("report.dashboard", description=__doc__.partition("\n")[0])
    parser.add_argument("--project", required=True, help="the W&B project, project_name of its runs")
    parser.add_argument("--entity", help="the user or team that has it (default: that of the login)")
    parser.add_argument("--name", default="training", help="name of the dashboard (default training)")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be made")
    return parser.parse_args(arguments)


def build_workspace(project: str, *, name: str, entity: str) -> "Workspace":
    """Builds the dashboard, without the network. ValueError where wandb-workspaces is missing."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # its own
            import wandb_workspaces.reports.v2 as panels
            import wandb_workspaces.workspaces as workspaces
    except ImportError:
        raise ValueError("wandb-workspaces is missing: pip install wandb-workspaces") from None

    sections = []
    for section, curves in SECTIONS.items():
        of_section = [
            panels.LinePlot(title=each.title, metric_regex=f"^{each.metrics}$", log_y=each.has_log_scale)
            for each in curves
        ]
        if section == _PICTURES_IN:
            of_section.append(
                panels.MediaBrowser(title="what it thinks", media_keys=[PICTURES], num_columns=1)
            )
        layout = workspaces.SectionLayoutSettings(columns=3, rows=-(-len(of_section) // 3))
        sections.append(
            workspaces.Section(name=section, panels=of_section, is_open=True, layout_settings=layout)
        )
    columns = ["run:displayName", *(f"summary:{name}" for name in _COLUMNS)]
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=sections,
        runset_settings=workspaces.RunsetSettings(pinned_columns=columns),
    )


def _outline(workspace: "Workspace") -> str:
    lines = []
    for section in workspace.sections:
        lines.append(section.name)
        for panel in section.panels:
            shown = getattr(panel, "metric_regex", None) or ", ".join(panel.media_keys)
            lines.append(f"  {panel.title:<48}{shown}")
    return "\n".join(lines)


def _save(workspace: "Workspace") -> None:
    """Makes the dashboard at W&B, and prints its address. ValueError where W&B refuses."""
    import wandb

    if not has_wandb_login():
        raise ValueError("no W&B login is stored: run wandb login, or set WANDB_API_KEY")
    wandb.setup(wandb.Settings(silent=True))
    try:
        workspace.entity = workspace.entity or wandb.Api().default_entity
        workspace.save()
    except Exception as error:  # the client's own, requests', or pydantic's
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"W&B did not take the dashboard ({reason}): is there a project {workspace.project!r}, and may "
            "you write there (--entity)?"
        ) from None
    print(f"W&B: {workspace.url}")


if __name__ == "__main__":
    main()
