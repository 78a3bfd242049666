"""Makes the W&B dashboard of a project: curves of learning, halting, evaluation, throughput and machines.

python -m report.dashboard --project sudoku --entity my-team
python -m report.dashboard --project sudoku --dry-run
"""

import argparse
import warnings
from collections.abc import Sequence
from typing import Any

from config.architecture import architectures
from report.run import other_metrics
from runtime.command_line import OneLineParser, one_line_errors
from training.wandb import PICTURES, has_wandb_login

# {section: {title of a panel: regular expression for the full names of its metrics}} (docs/metrics.md).
SECTIONS = {
    "learning": {
        "loss": "train/lm_loss",
        "cells right, at halting": "train/accuracy",
        "puzzles right, at halting and after one thinking step": "train/exact_accuracy(_after_step_1)?",
        "gradient norm": "train/grad_norm",
        "learning rates": "train/([a-z_]+_)?lr",
    },
    "halting": {
        "thinking steps until halting": "train/steps",
        "halting loss": "train/q_(halt|continue)_loss",
        "Q head knows whether it is right": "(train|eval/[^/]+)/q_halt_accuracy",
        "thinking steps, if the Q head halted": "eval/[^/]+/act_steps",
        "puzzles right, if the Q head halted": "eval/[^/]+/act_exact_accuracy",
    },
    "evaluation": {
        "puzzles right": "(eval|eval_raw|validation)/[^/]+/exact_accuracy",
        "by the rules of the puzzle": "eval/[^/]+/[a-z]+/((valid|shortest)_accuracy|pass@[12])",
        "cells right": "(eval|eval_raw|validation)/[^/]+/accuracy",
        "loss": "(eval|eval_raw|validation)/[^/]+/lm_loss",
        "best so far": "best/[a-z_]*(accuracy|loss)",
    },
    "throughput": {
        "examples per second": "train/examples_per_second",
        "petaflops of training so far": "train/petaflops",
        "seconds of a training step": "train/step_seconds",
        "seconds of a training step waiting for data": "train/data_wait_seconds",
        "seconds of a training step waiting for other ranks": "train/sync_seconds",
        "seconds waiting for checkpoints": "train/checkpoint_stall_seconds",
    },
    "machines": {
        "memory": "train/peak_memory_bytes",
        "seconds of computing, slowest and fastest rank": "train/compute_seconds_(slowest|fastest)_rank",
        "slowest rank": "train/slowest_rank",
    },
}
_LOGARITHMIC = ("loss", "gradient norm", "halting loss")
_OTHERS = {name: f"(train|eval/[^/]+)/{name}" for arch in architectures() for name in other_metrics(arch)}
SECTIONS |= {"others": _OTHERS} if _OTHERS else {}
_COLUMNS = ("best/exact_accuracy", "best/step")  # of the table of runs, after the name of the run


def main(arguments: Sequence[str] | None = None) -> None:
    with one_line_errors("dashboard"):
        options = _parse_options(arguments)
        workspace = build_workspace(options.project, name=options.name, entity=options.entity or "")
        if options.dry_run:
            _outline(workspace)
        else:
            _save(workspace)


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = OneLineParser("report.dashboard", description=__doc__.partition("\n")[0])
    parser.add_argument("--project", required=True, help="the W&B project, project_name of its runs")
    parser.add_argument("--entity", help="the user or team that has it (default: the one of the login)")
    parser.add_argument("--name", default="training", help="name of the dashboard (default training)")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be made")
    return parser.parse_args(arguments)


def build_workspace(project: str, *, name: str, entity: str) -> Any:
    """Builds the dashboard in memory, sending nothing. ValueError where wandb-workspaces is missing."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of wandb_workspaces itself
            import wandb_workspaces.reports.v2 as panels
            import wandb_workspaces.workspaces as workspaces
    except ImportError:
        raise ValueError("wandb-workspaces is missing: pip install wandb-workspaces") from None

    sections = []
    for section, curves in SECTIONS.items():
        drawn = [
            panels.LinePlot(title=title, metric_regex=f"^{metrics}$", log_y=title in _LOGARITHMIC)
            for title, metrics in curves.items()
        ]
        if section == "evaluation":
            drawn.append(panels.MediaBrowser(title="what it thinks", media_keys=[PICTURES], num_columns=1))
        layout = workspaces.SectionLayoutSettings(columns=3, rows=-(-len(drawn) // 3))
        sections.append(workspaces.Section(name=section, panels=drawn, is_open=True, layout_settings=layout))
    columns = ["run:displayName", *(f"summary:{name}" for name in _COLUMNS)]
    return workspaces.Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=sections,
        runset_settings=workspaces.RunsetSettings(pinned_columns=columns),
    )


def _outline(workspace: Any) -> None:
    for section in workspace.sections:
        print(section.name)
        for panel in section.panels:
            print(f"  {panel.title:<48}{getattr(panel, 'metric_regex', None) or ', '.join(panel.media_keys)}")


def _save(workspace: Any) -> None:
    """Creates the dashboard at W&B, and prints its URL. Raises ValueError where W&B refuses."""
    import wandb

    if not has_wandb_login():
        raise ValueError("no W&B login is stored: run wandb login, or set WANDB_API_KEY")
    wandb.setup(wandb.Settings(silent=True))
    try:
        workspace.entity = workspace.entity or wandb.Api().default_entity
        workspace.save()
    except Exception as error:  # an error of wandb, requests or pydantic
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"W&B did not take the dashboard ({reason}): is there a project {workspace.project!r}, and may "
            "you write there (--entity)?"
        ) from None
    print(f"W&B: {workspace.url}")


if __name__ == "__main__":
    main()
