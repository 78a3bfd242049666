"""Which checkpoint a start goes on from. Rank 0 decides; the others load what it chose."""

from pathlib import Path

from checkpointing.files import (
    CONFIG_FILE,
    CorruptCheckpointError,
    checkpoints_in,
    set_aside,
    step_of,
    verify_checkpoint,
)
from config.schema import PretrainConfig
from parallel import log
from training.run_folder import check_same_run


def choose_checkpoint(run_folder: Path, config: PretrainConfig) -> tuple[Path, set[str]] | None:
    """The checkpoint that `resume` means, verified, and its files; None where the run begins.

    - auto: the newest of the run folder; damaged ones on the way to it are set aside
    - must: the same, but there has to be one
    - never: none, and there must not be one, as it would be overwritten
    - a path: that of another run, or its newest; once the run has checkpoints of its own, those count

    Raises ValueError, one line, where that cannot be.
    """
    own = checkpoints_in(run_folder)
    if config.resume == "never":
        if own:
            raise ValueError(
                f"resume=never, but {run_folder} has come to {own[-1].name}: choose another run_name, "
                "or resume=auto"
            )
        return None
    newest = _newest_whole(own, are_ours=True)
    if newest is not None:
        check_same_run(newest[0] / CONFIG_FILE, config)
    if config.resume == "auto":
        return newest
    if config.resume == "must":
        if newest is None:
            raise ValueError(f"resume=must, but {run_folder} has no checkpoint")
        return newest
    return _choose_from(Path(config.resume), run_folder, newest)


def _choose_from(path: Path, run_folder: Path, newest: tuple[Path, set[str]] | None) -> tuple[Path, set[str]]:
    """What resume=`path` means in a run folder whose own newest checkpoint is `newest`."""
    if newest is not None:
        if path.resolve().parent == run_folder.resolve() and path.resolve() != newest[0].resolve():
            raise ValueError(
                f"resume={path} is not the newest checkpoint of this run, that is {newest[0].name}: "
                "choose another run_name, and it branches off there"
            )
        log.info(f"{run_folder} goes on from its own newest checkpoint, resume={path} is where it began")
        return newest
    if not path.is_dir():
        raise ValueError(
            f"resume={path} is no folder: give auto, never, must, a run folder or a step_<N> in one"
        )
    if step_of(path) is not None:
        return path, verify_checkpoint(path)
    found = _newest_whole(checkpoints_in(path), are_ours=False)
    if found is None:
        raise ValueError(f"resume={path}: there is no checkpoint step_<N> in it")
    return found


def _newest_whole(folders: list[Path], *, are_ours: bool) -> tuple[Path, set[str]] | None:
    """The last of the folders that is what was written, and its files; None where there are no folders.

    Damaged ones after it are reported, and set aside if they `are_ours`. ValueError where all are damaged:
    to begin anew is for a person to decide.
    """
    damaged = []
    for folder in reversed(folders):
        try:
            files = verify_checkpoint(folder)
        except CorruptCheckpointError as error:
            damaged.append((folder, error))
            continue
        for other, error in damaged:
            what = f"it is now {set_aside(other).name}, and" if are_ours else "so"
            log.warning(f"{error}: {what} {folder.name} is used")
        return folder, files
    if damaged:
        raise ValueError(
            f"{damaged[0][1]}, and there is no whole one before it: remove it to begin anew, or choose "
            "another run_name"
        )
    return None
