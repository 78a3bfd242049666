"""Creates a W&B dashboard for a project: learning, halting, evaluation, throughput, hardware.

python -m report.dashboard --project sudoku --entity my-team
python -m report.dashboard --project sudoku --dry-run
"""

import runtime.environment  # noqa: F401

import argparse
import warnings
from collections.abc import Sequence
from typing import Any

from config.architecture import architectures
from report.run import other_metrics
from runtime.command_line import OneLineParser, one_line_errors
from training.loggers import PICTURES

_SET = "(eval|eval_raw|test|validation)/[^/]+"
# {section: {title of a panel: regular expression for the full names of its metrics}} (docs/metrics.md).
SECTIONS = {
    "learning": {
        "loss": "train/lm_loss",
        "total loss": "train/loss",
        "cells right, at halting": "train/accuracy",
        "solved puzzles, at halting, after one step": "train/exact_accuracy(_after_step_1)?",
        "gradient norm": "train/grad_norm",
        "learning rates": "train/([a-z_]+_)?lr",
    },
    "halting": {
        "thinking steps until halting": "train/steps",
        "halting loss": "train/q_(halt|continue)_loss",
        "halting value right (is the answer correct?)": f"(train|{_SET})/q_halt_accuracy",
        "thinking steps, if the model halted": f"{_SET}/act_steps",
        "solved puzzles, if the model halted": f"{_SET}/act_exact_accuracy",
    },
    "evaluation": {
        "solved puzzles": f"{_SET}/(unseen/)?exact_accuracy",
        "solved puzzles, by the rules": f"{_SET}/[a-z]+/((valid|shortest)_accuracy|(outputs/)?pass@[12])",
        "cells right": f"{_SET}/accuracy",
        "loss": f"{_SET}/lm_loss",
        "best so far": "best/[a-z_]*(accuracy|loss)",
    },
    "throughput": {
        "examples per second": "train/examples_per_second",
        "petaflops of training so far": "train/petaflops",
        "seconds per training step": "train/step_seconds",
        "seconds per training step waiting for data": "train/data_wait_seconds",
        "seconds per training step waiting for other ranks": "train/sync_seconds",
        "fraction of a training step waiting for other ranks": "train/sync_share",
        "seconds waiting for checkpoints": "train/checkpoint_stall_seconds",
    },
    "machines": {
        "memory": "train/peak_memory_bytes",
        "compute seconds, slowest and fastest rank": "train/compute_seconds_(slowest|fastest)_rank",
        "slowest rank, rank with the peak memory": "train/(slowest|peak_memory)_rank",
    },
}
_LOGARITHMIC = ("loss", "total loss", "gradient norm", "halting loss")
_OTHERS = {name: f"(train|{_SET})/{name}" for arch in architectures() for name in other_metrics(arch)}
SECTIONS |= {"others": _OTHERS} if _OTHERS else {}
_COLUMNS = ("best/exact_accuracy", "best/step")  # columns of the run table, after the name of the run


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
    parser.add_argument("--project", required=True, help="W&B project; the runs have project_name set to it")
    parser.add_argument("--entity", help="owner of the project (default: the user that is logged in)")
    parser.add_argument("--name", default="training", help="name of the dashboard (default: training)")
    parser.add_argument("--dry-run", action="store_true", help="print the panels, and create nothing")
    return parser.parse_args(arguments)


def build_workspace(project: str, *, name: str, entity: str) -> Any:
    """Builds a W&B dashboard for a project in memory, without contacting W&B.

    Raises ValueError if the package wandb-workspaces is missing.

    name: Name of the dashboard.
    entity: W&B user or team that owns the project. "" stands for the default entity of the user.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # raised by wandb_workspaces itself
            import wandb_workspaces.reports.v2 as panels
            import wandb_workspaces.workspaces as workspaces
    except ImportError:
        raise ValueError("wandb-workspaces is not installed. Run pip install wandb-workspaces.") from None

    sections = []
    for section, curves in SECTIONS.items():
        drawn = [
            panels.LinePlot(title=title, metric_regex=f"^{metrics}$", log_y=title in _LOGARITHMIC)
            for title, metrics in curves.items()
        ]
        if section == "evaluation":
            drawn.append(panels.MediaBrowser(title="thinking steps", media_keys=[PICTURES], num_columns=1))
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
    import wandb

    from training.loggers.wandb import has_wandb_login

    if not has_wandb_login():
        raise ValueError("not logged in to W&B. Run wandb login, or set WANDB_API_KEY.")
    wandb.setup(wandb.Settings(silent=True))
    try:
        workspace.entity = workspace.entity or wandb.Api().default_entity
        workspace.save()
    except Exception as error:  # an error of wandb, requests or pydantic
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"W&B rejected the dashboard ({reason}). Check that project {workspace.project!r} exists. "
            "Pass --entity if it belongs to another user or team."
        ) from None
    print(f"W&B: {workspace.url}")


if __name__ == "__main__":
    main()
