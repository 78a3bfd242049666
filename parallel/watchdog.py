"""No rank waits forever for another that stopped responding: all end, and say which one it was, and where.

Every rank tells the store about itself at every tick: its heartbeat. Rank 0 listens to all ranks and the
others to rank 0, so that the store has little to do. Whoever misses a rank, or makes no progress itself, sets
the alarm in the store; then all listen to all for a moment, report, and end.

Two threads, because no call to a store returns while the process that serves it is stopped, whatever its
timeout: one talks to the store, the other looks at the clock and never waits for anybody. Takes no torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from parallel import log
from parallel.process_group import attempt_number, connect_store, is_main, rank, world_size

if TYPE_CHECKING:
    from torch.distributed import Store

EXIT_HANG = 124  # the exit status of a rank that the watchdog ends; the same as of the command `timeout`

_TICK_SECONDS = 0.5
# In ticks; together a rank ends about 7 seconds after the timeout.
_SILENT = 5  # without a heartbeat for so long, a rank does not respond
_ANSWER = 7  # from the alarm to the report: until all that can have said where they are
_FAREWELL = 3  # from the report to the end: torchrun ends all ranks as soon as the first one goes
_BACKSTOP = 16  # from the timeout to the end of a process in which no thread of Python's runs any more

_REPOSITORY = str(Path(__file__).resolve().parent.parent) + os.sep
_MAX_NAMED = 8  # ranks, and groups of ranks, in one line


@dataclasses.dataclass(frozen=True)
class _Heartbeat:
    """What a rank tells of itself.

    count: another one at every tick; time: of its wall clock; step: how many are done, None before the first;
    state: step and place, for people;
    is_starting: the limit of its silence is init_timeout_seconds, else step_timeout_seconds;
    is_paused: it is, or (rank 0) it has heard that another rank is;
    has_left: it will be silent, and nobody shall miss it.
    """

    count: int
    time: float
    step: int | None
    state: str
    is_starting: bool
    is_paused: bool
    has_left: bool


@dataclasses.dataclass(frozen=True)
class Failure:
    """time: of the wall clock, when the first rank fell silent; step: how many were done by then, if any."""

    time: float
    step: int | None


def failed_attempt() -> Failure | None:
    """How the attempt before this one ended, if torchrun has started all ranks again; else None."""
    if world_size() == 1 or not attempt_number():
        return None
    store = connect_store(attempt=attempt_number() - 1)
    keys = [key for key in map(_key, range(world_size())) if store.check([key])]
    last = [_Heartbeat(**json.loads(text)) for text in store.multi_get(keys)] if keys else []
    if not last:
        return None
    steps = [heartbeat.step for heartbeat in last if heartbeat.step is not None]
    return Failure(min(heartbeat.time for heartbeat in last), max(steps, default=None))


def _key(number: int) -> str:
    """Where the heartbeat of a rank is in the store."""
    return f"heartbeat/{number}"


class Watchdog:
    """Around everything in which ranks wait for each other. In a world of one it does nothing.

    Until its first step is done, a rank may be silent or without progress for init_timeout_seconds, later for
    step_timeout_seconds; while it is `paused`, it must not be silent longer than that, but may take any time.
    Else every rank that still runs writes one line and the stacks of all its threads to stderr and to `files`
    (open files, or None; append to it at any time), and ends with status EXIT_HANG.

    The time in which this process itself was stopped (SIGSTOP) counts neither against it nor against others,
    unless it is longer than the timeout plus _BACKSTOP: the timer behind that knows only the wall clock.
    """

    def __init__(self, *, init_timeout_seconds: float, step_timeout_seconds: float):
        self.files: list[TextIO | None] = []
        self._init_timeout, self._step_timeout = init_timeout_seconds, step_timeout_seconds
        # Of the thread that enters the block.
        self._step: int | None = None
        self._pauses, self._progress = 0, 0
        self._end = ""  # how it left the block
        # Of the thread that talks; of each rank the newest heartbeat, and since when it is that.
        self._heard: dict[int, tuple[_Heartbeat, float]] = {}
        self._answered_at, self._store_error = 0.0, ""
        self._alarm = ""  # why all must end, as the store has it
        # Of the thread that looks at the clock. Times are the seconds in which this process was running.
        self._now = self._progressed_at = 0.0
        self._found = ""  # why all must end, as this rank has found it
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def step_done(self, step: int) -> None:
        """After every training step; `step` counts those that are done."""
        self._step = step
        self._progress += 1

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Around evaluation, saving, and whatever else may take any time on some ranks while others wait."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            self._progress += 1

    def __enter__(self) -> Watchdog:
        if world_size() > 1:
            self._watched_thread = threading.get_ident()
            # A child that is forked while the timer runs would wait for the timer's thread, which it does not
            # have, when it ends. The next tick sets the timer again.
            os.register_at_fork(before=faulthandler.cancel_dump_traceback_later)
            for task in (self._talk, self._watch):
                self._threads.append(threading.Thread(target=task, daemon=True))
                self._threads[-1].start()
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_) -> None:
        self._end = f"ended with {error_type.__name__}" if error_type else "ended"
        # After an alarm an error is but a consequence: the report, which has begun, ends this process.
        must_report = error_type is not None and bool(self._alarm or self._found)
        if not must_report:
            self._stop.set()
        for thread in reversed(self._threads):
            thread.join(None if must_report else 4 * _TICK_SECONDS)  # the store may never answer

    def _give_up(self) -> None:
        """A mistake of ours is told, and ends the watch, not the run: the last heartbeat takes leave."""
        traceback.print_exc()
        log.warning("the watchdog has failed: the run goes on without it")
        self._end = "not watched any more"
        self._stop.set()

    # --- The thread that talks to the store ---

    def _talk(self) -> None:
        store, count, is_last = None, 0, False
        while not is_last:
            is_last = self._stop.wait(_TICK_SECONDS if count else 0)
            count += 1
            try:
                store = store or connect_store()
                self._exchange_heartbeats(store, self._heartbeat(count, has_left=is_last))
                self._answered_at, self._store_error = self._now, ""
            except RuntimeError as error:  # a lost connection may be made anew; if not, silence tells
                store, self._store_error = None, f" ({str(error).partition(chr(10))[0]})"
            except Exception:
                self._give_up()

    def _exchange_heartbeats(self, store: Store, heartbeat: _Heartbeat) -> None:
        store.set(_key(rank()), json.dumps(dataclasses.asdict(heartbeat)))
        # Sets the alarm unless one is set, and reads it; other than `get` it does not wait for the key.
        self._alarm = store.compare_set("alarm", "", self._found).decode()
        ranks = range(world_size()) if is_main() or self._alarm else (0, rank())
        keys = {number: _key(number) for number in ranks}
        told = [number for number in ranks if number in self._heard or store.check([keys[number]])]
        for number, text in zip(told, store.multi_get([keys[number] for number in told]), strict=True):
            heard = _Heartbeat(**json.loads(text))
            if number not in self._heard or self._heard[number][0].count != heard.count:
                self._heard[number] = (heard, self._now)

    def _heartbeat(self, count: int, *, has_left: bool) -> _Heartbeat:
        return _Heartbeat(
            count,
            time.time(),
            self._step,
            self._state(),
            is_starting=self._is_starting(),
            is_paused=self._pauses > 0 or (is_main() and self._others_are_paused()),
            has_left=has_left,
        )

    def _state(self) -> str:
        if self._end:
            return self._end
        phase = "starting" if self._step is None else f"in step {self._step + 1}"
        return f"{'evaluating or saving' if self._pauses else phase}, {_place(self._watched_thread)}"

    # --- The thread that looks at the clock ---

    def _watch(self) -> None:
        progress, last, alarmed_at = self._progress, time.monotonic(), None
        try:
            while not self._stop.wait(_TICK_SECONDS):
                now = time.monotonic()
                self._now += min(now - last, 2 * _TICK_SECONDS)  # if it was longer, we were stopped
                last = now
                limit, _ = self._limit(self._is_starting())
                faulthandler.dump_traceback_later(limit + _BACKSTOP * _TICK_SECONDS, exit=True)
                if progress != self._progress or self._pauses or self._others_are_paused():
                    progress, self._progressed_at = self._progress, self._now
                if alarmed_at is None:
                    self._found = self._reason_to_end()
                    alarmed_at = self._now if self._alarm or self._found else None
                elif self._now - alarmed_at >= _ANSWER * _TICK_SECONDS:
                    self._report_and_exit()
        except Exception:
            self._give_up()
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _is_starting(self) -> bool:
        return self._step is None and not self._pauses

    def _limit(self, is_starting: bool) -> tuple[float, str]:
        """How long a rank may be silent or without progress, and that in words."""
        name = "init_timeout_seconds" if is_starting else "step_timeout_seconds"
        limit = self._init_timeout if is_starting else self._step_timeout
        return limit, f"{limit:g} s ({name})"

    def _others_are_paused(self) -> bool:
        return any(heard.is_paused for number, (heard, _) in self._heard.copy().items() if number != rank())

    def _reason_to_end(self) -> str:
        """Empty where all is well."""
        limit, words = self._limit(self._is_starting())
        if self._now - self._answered_at > limit:
            return f"no answer of the store for {words}: rank 0 or its node is gone{self._store_error}"
        for number in range(world_size()) if is_main() else (0,):
            heard, since = self._heard.get(number, (None, 0.0))
            silence, silence_words = self._limit(heard is None or heard.is_starting)
            # Until when the store has told of it: a store that is gone is no silence of a rank.
            if self._answered_at - since > silence and not (heard and heard.has_left):
                return f"no sign of life of rank {number} for {silence_words}"
        if self._now - self._progressed_at > limit:
            return f"no progress of rank {rank()} for {words}"
        return ""

    def _report_and_exit(self) -> None:
        # The end comes even if what we print goes into a full pipe that nobody reads.
        end = threading.Timer(_FAREWELL * _TICK_SECONDS, os._exit, (EXIT_HANG,))
        end.start()
        # On a line of its own, also where there is a progress bar.
        line = f"\nerror (rank {rank()}): {self._alarm or self._found}. {self._describe_ranks()}\n"
        for file in filter(None, (sys.stderr, *self.files)):
            with contextlib.suppress(OSError, ValueError):  # a full disk, a closed file
                os.write(file.fileno(), line.encode())  # past the locks of `file`, which others may hold
                faulthandler.dump_traceback(file)
        end.join()

    def _describe_ranks(self) -> str:
        """Who does not respond, then who is where, the smallest group first: often that is the culprit."""
        if self._now - self._answered_at >= _SILENT * _TICK_SECONDS:  # what we have heard is as old
            return f"{_name_ranks([rank()])}: {self._state()}"
        groups: dict[tuple[bool, str], list[int]] = {}
        for number in range(world_size()):
            heard, since = self._heard.get(number, (None, 0.0))
            is_silent = heard is None or (not heard.has_left and self._now - since >= _SILENT * _TICK_SECONDS)
            state = heard.state if heard else "never heard of"
            if heard and is_silent:
                state = f"not responding, last heard of {time.time() - heard.time:.0f} s ago {state}"
            groups.setdefault((is_silent, state), []).append(number)
        ordered = sorted(groups.items(), key=lambda group: (not group[0][0], len(group[1])))
        described = [f"{_name_ranks(numbers)}: {state}" for (_, state), numbers in ordered[:_MAX_NAMED]]
        return "; ".join(described) + ("; ..." if len(ordered) > _MAX_NAMED else "")


def _name_ranks(numbers: list[int]) -> str:
    named = ", ".join(map(str, numbers[:_MAX_NAMED]))
    more = f" and {len(numbers) - _MAX_NAMED} more" if len(numbers) > _MAX_NAMED else ""
    return f"rank{'s' if len(numbers) > 1 else ''} {named}{more}"


def _place(thread: int) -> str:
    """Where a thread is in our code; if that is in `parallel`, also who called it."""
    frame = sys._current_frames().get(thread)
    places = []
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_REPOSITORY) and "site-packages" not in path:
            path = path.removeprefix(_REPOSITORY)
            is_parallel = path.startswith("parallel" + os.sep)
            if not places or not is_parallel:
                places.insert(0, f"{path}:{frame.f_lineno} ({frame.f_code.co_name})")
            if not is_parallel:
                break
        frame = frame.f_back
    return " > ".join(places) or "outside our code"
