"""Many texts by several processes: Ray actors that each hold the whole ensemble, and are given prompts as they go."""

from __future__ import annotations

import itertools
import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from specens.decoding.trace import Round
from specens.engines.ray import LIVES, PLACEMENT_TIMEOUT, shown, start_ray
from specens.files.writer import Found, Writer
from specens.settings.arguments import check_callbacks, check_seed, is_seed
from specens.settings.jobs import Job, check_many, derived_seed, draw_seed

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from specens.generate import Generation, SpeculativeEnsemble
    from specens.settings.jobs import Settings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wanted:
    """A text that is to be written: of a prompt, by its number, and among the samples of that prompt.

    losses: how many workers were lost with it.
    """

    index: int
    sample: int
    job: Job
    losses: int = 0


@dataclass
class Worker:
    """An actor, the pieces that it has by their numbers, and how often it was lost since it finished one."""

    actor: Any
    pieces: dict[int, Wanted] = field(default_factory=dict)
    losses: int = 0
    has_begun: bool = False  # whether it has said that it can be given pieces
    is_last: bool = False  # whether it was told that nothing follows

    def write(self, call: dict[str, Any], traced: bool) -> Any:
        """Have it write what it will be given; the stream of what it finishes."""
        self.pieces, self.has_begun, self.is_last = {}, False, False
        return self.actor.write.options(num_returns="streaming", max_task_retries=0).remote(call, traced)


class Workers:
    """An ensemble in several processes, on this machine or on those of a Ray cluster, that write texts of many prompts.

    make: makes the SpeculativeEnsemble in each. num_workers: how many. options: of each actor, as Ray takes them
    (num_cpus, num_gpus, resources, ...); Ray gives one that asks for no GPU none, and one thread of the processor.
    Ray is started, or joined where its variable RAY_ADDRESS says so, unless it is already. A worker that is lost is
    started again, until it has been lost five times without finishing a text. Its texts are written by any of them, one
    at a time: a text with which a worker is lost again has failed.
    Raises ValueError where Ray is not installed, or num_workers is no number of them.
    """

    def __init__(
        self,
        make: Callable[[], SpeculativeEnsemble],
        num_workers: int,
        *,
        options: dict[str, Any] | None = None,
    ) -> None:
        if not isinstance(num_workers, int) or isinstance(num_workers, bool) or num_workers < 1:
            raise ValueError(f"num_workers: expected an integer >= 1, got {num_workers!r}")
        self._ray = ray = start_ray("num_workers")
        # Never restarted by Ray, so that what is under way to a lost one reaches no other. Threads: write, give, ask.
        settings = {"scheduling_strategy": "SPREAD", "max_task_retries": -1, "max_concurrency": 4, **(options or {})}
        actors = ray.remote(Writer).options(**settings)
        self._new, self._options = lambda: actors.remote(make), options or {}
        self._workers = [Worker(self._new()) for _ in range(num_workers)]
        self._is_writing = False
        for worker in self._workers:
            worker.actor.ask.remote(bool)  # all load at the same time
        self.close = weakref.finalize(self, _end, self._ray, self._workers)

    def ask(self, function: Callable[[SpeculativeEnsemble], Found]) -> Found:
        """What a function, which is sent there, says of the ensemble in one of the workers; or what it raises."""
        while True:
            self._check_open()
            worker = self._workers[0]
            try:
                return self._ray.get(self._wait([worker.actor.ask.remote(function)]))
            except self._ray.exceptions.RayError as error:
                self._replace(worker, error)

    def generate_many(
        self,
        prompts: Iterable[Any],
        *,
        batch_size: int = 8,
        samples: int = 1,
        exact: bool = False,
        on_round: Callable[[Round], None] | None = None,
        on_error: Callable[[int, int, Exception], None] | None = None,
        **settings: Unpack[Settings],
    ) -> Iterator[Generation]:
        """As `SpeculativeEnsemble.generate_many`, with `batch_size` texts at a time in each worker: the same texts.

        Texts depend on their prompts and seeds, not on workers, as there they do not on the batch: but for the rounding
        of logits, which `exact` excludes. Of each text one more prompt than a worker has room for waits in it. A worker
        that cannot begin, as one that Ray has no place for, is waited for as long as there are texts to give it.
        on_round: called with the rounds of a text when it is finished. on_error: called with a ValueError or a
        RuntimeError that says what was raised there, or that a text's worker was lost a second time.
        Raises as there; RuntimeError where workers are lost again and again, and while they write the texts of another
        call, which are to be taken, or let go by `close`, first.
        """
        check_many(prompts, batch_size, samples, exact)
        check_callbacks(on_round=on_round, on_error=on_error)
        call = {"batch_size": batch_size, "exact": exact, **settings}
        seed = settings.get("seed")
        if seed is not None:
            check_seed(seed)
        pieces = _pieces(prompts, samples, draw_seed() if seed is None else seed)
        return self._generate(pieces, call, on_round, on_error)

    def _generate(
        self,
        pieces: Iterator[Wanted],
        call: dict[str, Any],
        on_round: Callable[[Round], None] | None,
        on_error: Callable[[int, int, Exception], None] | None,
    ) -> Iterator[Generation]:
        """As workers finish pieces, their texts, and more pieces to them."""
        work = Work(pieces, call["batch_size"] + 1)
        runs = dict[Any, Worker]()  # by the streams of what workers finish
        call_of_each = call, on_round is not None
        self._check_open()
        if self._is_writing:
            raise RuntimeError("generate_many: expected all texts of the call before to be taken, or it to be closed")
        self._is_writing = True
        try:
            runs = {worker.write(*call_of_each): worker for worker in self._workers}
            while any(own.has_begun or work.remains for own in runs.values()):  # one without a place never begins
                stream = self._wait(list(runs))
                worker = runs[stream]
                try:
                    finished = self._ray.get(next(stream))
                except (StopIteration, self._ray.exceptions.RayError) as ended:
                    del runs[stream]
                    is_lost = isinstance(ended, self._ray.exceptions.RayError)
                    poison = work.again(worker, is_lost)
                    if is_lost:
                        self._replace(worker, ended)
                        if poison is not None:
                            twice = RuntimeError(f"a worker was lost with this text, twice ({type(ended).__name__})")
                            work.fail(poison, twice, on_error)
                        self._check_open()
                    if work.remains:  # for all that have nothing to do
                        busy = {id(own) for own in runs.values()}
                        idle = [own for own in self._workers if id(own) not in busy]
                        runs |= {own.write(*call_of_each): own for own in idle}
                    continue
                if finished is None:
                    worker.has_begun = True
                    work.give(worker)
                    continue
                piece = work.finish(worker, finished.number)
                text = finished.text
                for of_text in finished.rounds:
                    assert on_round is not None
                    on_round(replace(of_text, index=piece.index, sample=piece.sample))
                if isinstance(text, Exception):
                    work.fail(piece, text, on_error)
                work.give(worker)
                if not isinstance(text, Exception):
                    yield replace(text, index=piece.index, sample=piece.sample)
        finally:
            self._is_writing = False
            for worker in runs.values():  # not at their end: their texts are wanted no more
                self._ray.kill(worker.actor)
                worker.actor = self._new()
        if work.failure is not None:
            raise work.failure

    def _wait(self, awaited: list[Any]) -> Any:
        """The first that comes; a warning where none does for long: Ray lets actors wait for a place without a word."""
        while True:
            come, _ = self._ray.wait(awaited, num_returns=1, timeout=PLACEMENT_TIMEOUT)
            if come:
                return come[0]
            free, whole = shown(self._ray.available_resources()), shown(self._ray.cluster_resources())
            amounts = f"each asks for {shown(self._options)}, free are {free} of {whole}"
            logger.warning("no word of a worker for %g s: it loads or Ray has no place; %s", PLACEMENT_TIMEOUT, amounts)

    def _check_open(self) -> None:
        """Raise RuntimeError where there are no workers any more."""
        if not self.close.alive:
            raise RuntimeError("the workers are closed")
        if not self._workers:
            raise RuntimeError("all workers were lost again and again")

    def _replace(self, worker: Worker, error: Exception) -> None:
        """Start a lost worker again; one that finished nothing in all its lives is no more. Raises what it raised."""
        known = self._ray.exceptions
        if isinstance(error, known.RayTaskError):
            raise error.cause from error
        losses = known.RayActorError, known.ObjectLostError, known.NodeDiedError, known.OutOfMemoryError
        if not isinstance(error, losses):
            raise RuntimeError(str(error)) from error  # such as one of a class that cannot be made again here
        self._check_open()
        logger.warning("a worker was lost (%s); its texts begin again", type(error).__name__)
        self._ray.kill(worker.actor)
        worker.losses += 1
        if worker.losses < LIVES:
            worker.actor = self._new()
        else:
            self._workers.remove(worker)


class Work:
    """The pieces of a call. lost: those of workers that ended too early. failure: after which no others begin.

    room: how many pieces a worker has at a time.
    """

    def __init__(self, pieces: Iterator[Wanted], room: int) -> None:
        self._pieces, self._room, self._numbers = pieces, room, itertools.count()
        self.lost: deque[Wanted] = deque()
        self.failure: Exception | None = None
        self._is_taken = False

    @property
    def remains(self) -> bool:
        """Whether there is more to give."""
        return bool(self.lost) or not (self._is_taken or self.failure)

    def give(self, worker: Worker) -> None:
        """Give a worker what it has room for, and word that nothing follows.

        One with which a worker was lost is given to one that has no other, and nothing follows it: so what ends a
        worker a second time is no other.
        """
        jobs: list[tuple[int, Job] | None] = []
        while len(worker.pieces) < self._room and not worker.is_last:
            piece = self.lost.popleft() if self.lost and not worker.pieces else self._take()
            if piece is not None:
                number = next(self._numbers)
                worker.pieces[number] = piece
                jobs.append((number, piece.job))
            worker.is_last = piece is None or piece.losses > 0
            if worker.is_last:
                jobs.append(None)
        if jobs:
            worker.actor.give.remote(jobs)

    def finish(self, worker: Worker, number: int) -> Wanted:
        """The piece that a worker has finished."""
        worker.losses = 0
        return worker.pieces.pop(number)

    def fail(self, piece: Wanted, error: Exception, on_error: Callable[[int, int, Exception], None] | None) -> None:
        """Have a text of which there is none told to the caller."""
        if on_error is None:
            self.failure = self.failure or error
        else:
            on_error(piece.index, piece.sample, error)

    def again(self, worker: Worker, is_lost: bool) -> Wanted | None:
        """Take back what a worker did not finish, but for one with which a worker was lost before: that one."""
        pieces, worker.pieces = list(worker.pieces.values()), {}
        if is_lost and any(piece.losses for piece in pieces):
            return pieces[0]  # it had no other
        self.lost.extend(replace(piece, losses=piece.losses + is_lost) for piece in pieces)
        return None

    def _take(self) -> Wanted | None:
        if self.failure is not None:
            return None
        try:
            piece = next(self._pieces, None)
        except Exception as error:  # noqa: BLE001
            piece, self.failure = None, error
        self._is_taken = piece is None
        return piece


def ask(ensemble: SpeculativeEnsemble | Workers, function: Callable[[SpeculativeEnsemble], Found]) -> Found:
    """What a function says of an ensemble, which may be in Workers."""
    return ensemble.ask(function) if isinstance(ensemble, Workers) else function(ensemble)


def _pieces(prompts: Iterable[Any], samples: int, seed: int) -> Iterator[Wanted]:
    """Each text with its own seed, which it has in whatever process."""
    for index, prompt in enumerate(prompts):
        job = prompt if isinstance(prompt, Job) else Job(prompt)
        for sample in range(samples):
            given = (seed, index) if job.seed is None else (job.seed, 0)
            own = derived_seed(*given, sample) if is_seed(given[0]) else job.seed  # else the worker refuses it
            yield Wanted(index, sample, replace(job, seed=own))


def _end(ray: Any, workers: list[Worker]) -> None:
    if ray.is_initialized():
        for worker in workers:
            ray.kill(worker.actor)
