"""Ports files in parallel worker processes."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

import libcst as cst

from acclimate_port.decisions.project import Lookups, Project
from acclimate_port.decisions.symbols import MODULE, Facts, Kind, Symbol
from acclimate_port.engine import Look, Settings, Site, Status, may_concern, port_text
from acclimate_port.files.notebook import Notebook, code_of
from acclimate_port.files.text_files import Content, UnreadableError, decode, read, write
from acclimate_port.source.build_scripts import is_build_script
from acclimate_port.source.cuda_tensors import given_to_cuda
from acclimate_port.source.float64 import float64
from acclimate_port.source.mps_kernels import without_mps
from acclimate_port.source.named_in_texts import Names
from acclimate_port.source.needed_extensions import line_that_needs_cuda
from acclimate_port.source.outline import Outline, blocks_of_refused, outline, outline_of_refused
from acclimate_port.source.parallel_reads import parallel_reads
from acclimate_port.source.process_groups import on_groups
from acclimate_port.source.saved_files import saved_files
from acclimate_port.source.sent_objects import sent_objects
from acclimate_port.source.settings_files import (
    chosen_by,
    devices_given,
    named_by,
    options_said,
    read_all,
    read_named,
    yaml_lines,
)
from acclimate_port.source.survey import Survey, joined, survey
from acclimate_port.source.tree import module_of, parse_as_python, text_of
from acclimate_port.source.unknown_code import unknown_code

_FEW_FILES = 4
_PROGRAMS = (".py", ".ipynb")
_MOST_ROUNDS = 10
"""How often files are ported again because of what stays in others."""
_DEEPEST = 5_000
_MOST_KEPT = 3_000_000
"""The most characters of the texts whose syntax trees are kept, which take some hundred bytes for each."""
_MOST_DROPPED = 4_000_000
"""The most characters of the texts whose syntax trees wait to be freed, as these hold each other."""
_TOO_DEEP = "its expressions are nested too deeply"
_NAMES_CUDA = re.compile(r"^[^#\n]*\b(?:cuda|nccl)\b", re.M)
_MAY_MEAN_CUDA = re.compile(r"^[^#\n]*(?:cuda|nccl|device|gpu)", re.M)
"""The words of a device in a file that cannot be read, which may do anything with it."""
_PROGRAM = Symbol(Kind.PLACE, f"here:{MODULE}")
_LINE = re.compile(r"\bline (\d+)")
_WORD = re.compile(rb"[A-Za-z_]\w*")


@dataclass(frozen=True)
class FileResult:
    """The result of porting one file."""

    path: Path
    before: str = ""
    after: str = ""
    sites: tuple[Site, ...] = ()
    failure: str = ""
    written: bool = False
    content: Content | None = None
    """How its text becomes bytes."""
    facts: Facts = field(default_factory=Facts)
    """What other files must know of what becomes of it."""
    values: Facts = field(default_factory=Facts)
    """What other files must know of its text, whatever becomes of it."""
    loads: frozenset[int] = frozenset()
    """The lines of the checkpoints that its edits load to a device."""

    @property
    def changed(self) -> bool:
        """Whether the text differs from the original."""
        return self.before != self.after


def port_files(
    paths: Sequence[Path],
    settings: Settings,
    apply: bool,
    jobs: int,
    done: Callable[[], None],
    wrote: Callable[[FileResult], None] = lambda _: None,
    beside: Sequence[Path] = (),
) -> list[FileResult]:
    """Ports files and, if asked, writes them; the results are in the order of the files.

    This process writes, so that it knows what is written if it is interrupted.

    Args:
        paths: the files.
        settings: the options.
        apply: whether to write.
        jobs: the number of processes.
        done: called after each file.
        wrote: called as soon as a file is written.
        beside: other programs of the project, which stay as they are.
    """
    hopeful: list[Path] = []
    results: dict[Path, FileResult] = {}
    surveys: list[Survey] = []
    for path in paths:
        try:
            data = read(path)
            concerned = may_concern(data)
            surveys.append(survey(data, path))
        except (OSError, UnreadableError) as error:
            results[path] = FileResult(path, failure=getattr(error, "strerror", None) or str(error))
            done()
            continue
        if concerned:
            hopeful.append(path)
        else:
            done()
    known = joined(surveys).with_folders(paths).resolved()
    if known.device_options:  # a user who follows these names a device that a guard replaces
        known = replace(known, device_options=known.device_options - options_said(paths))
    settings = replace(settings, survey=known)
    with _without_collector(), _Processes(settings, jobs) as processes:
        for result in processes.port({path: {} for path in hopeful}):
            results[result.path] = result
            done()
        results = {path: results[path] for path in paths if path in results}  # in the same order each time
        _port_again(paths, beside, results, settings, processes)
    for path in hopeful:
        if apply and results[path].changed:
            results[path] = _written(results[path])
        if results[path].written:
            wrote(results[path])
    return [results[path] for path in paths if path in results]


@contextmanager
def _without_collector() -> Iterator[None]:
    """Runs the block without Python's search for cycles, which takes a tenth of its time.

    It would go over the syntax trees of all files again and again, and these are kept anyway.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


_Doubts: TypeAlias = Mapping[Symbol, str]


class _Looks:
    """What this process found in each file that it may have to port again."""

    def __init__(self, most: int) -> None:
        self._most = most
        """The most characters of the texts whose syntax trees are kept."""
        self._of_files: dict[Path, dict[str, Look]] = {}
        self._dropped = 0
        """The characters of the texts that were forgotten since memory was last freed."""

    def port(self, path: Path, settings: Settings) -> FileResult:
        """Ports a file, which is not parsed again if it was ported before."""
        result = port_file(path, settings, self._of_files.setdefault(path, {}))
        if not result.facts.relies:
            self._drop(path)
        self._drop_oldest()
        return result

    def _drop(self, path: Path) -> None:
        """Forgets a file."""
        for text, look in self._of_files.pop(path, {}).items():
            self._dropped += len(text)
            look.file.forget()
        if self._dropped > _MOST_DROPPED:
            gc.collect()
            self._dropped = 0

    def _drop_oldest(self) -> None:
        """Forgets the files that were looked at first, as far as there are too many."""
        size = sum(len(text) for looks in self._of_files.values() for text in looks)
        for path in [*self._of_files]:
            if size <= self._most:
                return
            size -= sum(map(len, self._of_files[path]))
            self._drop(path)

    def forget(self) -> None:
        """Forgets all files, whose syntax trees Python's search for cycles would take longer to free."""
        for path in [*self._of_files]:
            self._drop(path)


class _Processes:
    """This process and others that port files; a file goes to the same one each time, which keeps its tree.

    Args:
        settings: the options.
        jobs: how many processes there may be; with one, or for few files, this process ports them.
    """

    def __init__(self, settings: Settings, jobs: int) -> None:
        self._settings, self._jobs = settings, jobs
        self._looks = _Looks(_MOST_KEPT)
        self._others: list[ProcessPoolExecutor] = []
        self._homes: dict[Path, int] = {}
        """The process that has ported a file, by its number among the others."""

    def __enter__(self) -> _Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for other in self._others:
            other.shutdown(cancel_futures=True)
        self._looks.forget()

    def port(self, doubts: Mapping[Path, _Doubts], concerns_all: bool = False) -> Iterator[FileResult]:
        """Ports files, and gives each result as soon as it is there.

        Args:
            doubts: the files, each with what stays in others, see :class:`acclimate_port.engine.Settings`.
            concerns_all: see there.
        """
        new = [path for path in doubts if path not in self._homes]
        if len(new) > _FEW_FILES and self._jobs > 1 and not self._others:
            self._others = [self._start() for _ in range(min(self._jobs, len(new)))]
        if len(new) <= _FEW_FILES or not self._others:
            for path in new:
                yield self._looks.port(path, _with(self._settings, doubts[path], concerns_all))
            new = []
        # The longest files go first, so that no process works on one while the others are idle. Each has a
        # second one waiting, so that it need not wait for this process.
        queue = deque(sorted(new, key=_size, reverse=True))
        numbers = [*range(len(self._others))] * 2
        firsts = [(queue.popleft(), number) for number in numbers[: len(queue)]]
        known = [(path, self._homes[path]) for path in doubts if path in self._homes]
        running = dict(
            self._submit(path, number, doubts[path], concerns_all) for path, number in [*firsts, *known]
        )
        while running:
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                path, number, process = running.pop(future)
                if queue:
                    following = queue.popleft()
                    running |= [self._submit(following, number, doubts[following], concerns_all)]
                try:
                    yield future.result()
                except BrokenProcessPool:
                    self._replace(number, process)
                    yield _port_in_new_process(path, _with(self._settings, doubts[path], concerns_all))

    def _start(self) -> ProcessPoolExecutor:
        kept = _MOST_KEPT // self._jobs
        return ProcessPoolExecutor(1, initializer=_begin, initargs=(self._settings, kept))

    def _submit(
        self, path: Path, number: int, doubts: _Doubts, concerns_all: bool
    ) -> tuple[Future[FileResult], tuple[Path, int, ProcessPoolExecutor]]:
        process = self._others[number]
        try:
            future = process.submit(_port_here, path, doubts, concerns_all)
        except BrokenProcessPool:
            process = self._replace(number, process)
            future = process.submit(_port_here, path, doubts, concerns_all)
        self._homes[path] = number
        return future, (path, number, process)

    def _replace(self, number: int, killed: ProcessPoolExecutor) -> ProcessPoolExecutor:
        """Starts another process in place of one that was killed, if that has not been done."""
        if self._others[number] is killed:
            killed.shutdown()
            self._others[number] = self._start()
        return self._others[number]


def _with(settings: Settings, doubts: _Doubts, concerns_all: bool) -> Settings:
    return replace(settings, elsewhere=doubts, concerns_all=concerns_all)


_settings = Settings()
_looks = _Looks(0)
"""What a process that ports files for another one has got and found; not used in that one."""


def _begin(settings: Settings, kept: int) -> None:
    """Makes a process ready to port files."""
    global _settings, _looks
    _settings, _looks = settings, _Looks(kept)
    gc.disable()  # as in the process that started it, see _without_collector
    gc.freeze()


def _port_here(path: Path, doubts: _Doubts, concerns_all: bool) -> FileResult:
    return _looks.port(path, _with(_settings, doubts, concerns_all))


def _port_in_new_process(path: Path, settings: Settings) -> FileResult:
    """Ports one file in a new process, after a worker with several files was killed."""
    try:
        with ProcessPoolExecutor(max_workers=1) as pool:
            return pool.submit(port_file, path, settings).result()
    except BrokenProcessPool:
        return FileResult(path, failure="its worker process was killed; run again with this file alone")


def _port_again(
    paths: Sequence[Path],
    beside: Sequence[Path],
    results: dict[Path, FileResult],
    settings: Settings,
    processes: _Processes,
) -> None:
    """Ports those files again whose edits rely on code of others that stays, until no more are found."""
    doubts: dict[Path, dict[Symbol, str]] = {}
    if not any(result.facts.relies for result in results.values()):
        return
    others = {
        path: _of_other(path, settings.survey)
        for path in paths
        if path not in results and path.suffix in _PROGRAMS
    }
    others |= {path: _of_refused(_code(path, _bytes(path)), _NAMES_CUDA) for path in beside}
    outlines = [*((path, one.facts.outline) for path, one in results.items())]
    outlines += [(path, facts.outline) for path, facts in others.items()]
    named = ((path, text) for path, one in outlines for text in one.texts)
    settings_read = read_named(named, paths)
    # What a program finds by a name that is not known may be in any file of settings.
    finds = {text.names for path, one in outlines for text in one.texts}
    settings_read |= read_all(paths) if finds & {Names.ANY, Names.PLUGIN} else {}
    others |= {path: _of_settings(path, text) for path, text in settings_read.items()}
    lookups = Lookups()

    def project() -> Project:
        known = {path: _facts_of(one) for path, one in results.items() if path.suffix in _PROGRAMS}
        return Project({**known, **others}, lookups)

    first = project()
    between = first.between(_words)
    # They are not ported, so nothing in them relies on others.
    asked = {
        one.path: replace(_facts_of(one), relies=frozenset())
        for one in processes.port({path: {} for path in between}, concerns_all=True)
    }
    others |= {path: asked[path] for path in between}
    for at in range(_MOST_ROUNDS):
        found = (first if not at and not between else project()).doubts()
        if not found:
            return
        for path, own in found.items():
            doubts[path] = {**own, **doubts.get(path, {})}
        for result in processes.port({path: doubts[path] for path in found}):
            before = results[result.path]
            facts = replace(result.facts, outline=before.facts.outline)
            results[result.path] = replace(result, facts=facts, values=before.values)


def _values(source: str | bytes, known: Survey) -> Facts:
    """The facts of a file about its numbers of 64 bits, its kernels and its checkpoints.

    Args:
        source: the file.
        known: facts from all files.
    """
    found = float64(source)
    stays = {Symbol(Kind.WIDE, f"here:{home}"): line for home, line in found.on_device.items()}
    stays |= {Symbol(Kind.GROUP, f"here:{home}"): line for home, line in on_groups(source).items()}
    stays |= {Symbol(Kind.KERNEL, f"here:{home}"): line for home, line in without_mps(source).items()}
    bound = given_to_cuda(source, known.extensions, by_workers=known.loads_by_workers, spawns=known.spawns)
    stays |= {Symbol(Kind.BOUND, f"here:{home}"): line for home, line in bound.items()}
    unknown = unknown_code(source, known)
    stays |= {Symbol(Kind.UNKNOWN, f"here:{home}"): line for home, line in unknown.items()}
    stays |= {Symbol(Kind.FLOAT64, text): line for text, line in found.given.items()}
    if line := line_that_needs_cuda(source, known.extensions_of_cuda):
        stays[Symbol(Kind.IMPORT, f"here:{MODULE}")] = line
    implies = [(Symbol(Kind.FLOAT64, one), Symbol(Kind.WIDE, f"here:{home}")) for one, home in found.taken]
    implies += [(Symbol(Kind.FLOAT64, one), Symbol(Kind.FLOAT64, other)) for one, other in found.passed]
    if known.spawns:
        objects = sent_objects(source)
        stays |= {Symbol(Kind.SENT, text): line for text, line in objects.holding.items()}
        implies += [
            (Symbol(Kind.SENT, one), Symbol(Kind.BOUND, f"here:{home}")) for one, home in objects.sent
        ]
        implies += [(Symbol(Kind.SENT, one), Symbol(Kind.SENT, other)) for one, other in objects.passed]
    if line := parallel_reads(source):
        stays[Symbol(Kind.SPLIT, "any:device_ids")] = line
    return Facts(stays=stays, implies=tuple(implies), files=saved_files(source))


def _facts_of(result: FileResult) -> Facts:
    """All facts of a file; checkpoints that its edits load to another device are none."""
    return _joined(result.facts, result.values, result.loads)


def _joined(facts: Facts, values: Facts, loaded: frozenset[int] = frozenset()) -> Facts:
    files = replace(values.files, loads=frozenset(one for one in values.files.loads if one[0] not in loaded))
    implied = (*facts.implies, *values.implies)
    return replace(facts, stays=facts.stays | values.stays, implies=implied, files=files)


def _of_settings(path: Path, text: str) -> Facts:
    """The facts of a file of settings: the device or the backend of CUDA that it gives a program."""
    stays = {Symbol(Kind.PLACE, f"here:{key}"): line for key, line in devices_given(path.name, text).items()}
    chosen = chosen_by(text) if path.suffix in (".yaml", ".yml") else ()
    return Facts(Outline(texts=frozenset((*chosen, *named_by(text)))), stays=stays)


def _of_other(path: Path, known: Survey) -> Facts:
    """The facts of a file without code for one kind of device."""
    code = _code(path, _bytes(path))
    if module_of(code) is None:
        return _of_refused(code)
    return _joined(Facts(outline(code)), _values(code, known))


def _code(path: Path, data: bytes) -> str:
    """The code of a file, also of one that cannot be written back."""
    text = text_of(data).replace("\0", "")
    return code_of(text) if path.suffix == ".ipynb" else text


def _of_refused(source: str, words: re.Pattern[str] = _MAY_MEAN_CUDA) -> Facts:
    """The facts of a file that is not ported: it stays on CUDA, and so does what it imports.

    Args:
        source: its code.
        words: finds that it has to do with CUDA.
    """
    places = [(_PROGRAM, source, 0)]
    places += [
        (Symbol(Kind.PLACE, f"here:{name}"), text, start) for name, text, start in blocks_of_refused(source)
    ]
    stays = {
        symbol: source.count("\n", 0, start + named.start()) + 1
        for symbol, text, start in places
        if (named := words.search(text)) is not None
    }
    own = outline(source) if module_of(source) is not None else outline_of_refused(source)
    return Facts(own, stays=stays)


def _bytes(path: Path) -> bytes:
    """What a file holds; nothing, if it cannot be read any more."""
    try:
        return read(path)
    except (OSError, UnreadableError):
        return b""


def _words(path: Path) -> set[str]:
    return {word.decode() for word in _WORD.findall(_bytes(path))}


def _is_in_package(path: Path) -> bool:
    return (path.parent / "__init__.py").exists()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _written(result: FileResult) -> FileResult:
    """Writes what a file became, if it changed; an error is part of the result."""
    content = result.content
    if content is None:
        return result
    try:
        write(result.path, content.encode(result.after), content.encode(result.before))
    except UnreadableError as error:
        return replace(result, failure=str(error))
    except OSError as error:
        return replace(result, failure=error.strerror or str(error))
    return replace(result, written=True)


def port_file(path: Path, settings: Settings, looks: dict[str, Look] | None = None) -> FileResult:
    """Ports one file and does not write it; an error in the file is part of the result.

    Args:
        path: the file.
        settings: the options.
        looks: what was found in its texts, see :func:`acclimate_port.engine.port_text`.
    """
    with _without_collector():
        return _port_file(path, settings, looks)


def _port_file(path: Path, settings: Settings, looks: dict[str, Look] | None) -> FileResult:
    try:
        data = read(path)
        if not (may_concern(data) or settings.concerns_all):
            return FileResult(path)
    except UnreadableError as error:
        return FileResult(path, failure=str(error))
    except OSError as error:
        return FileResult(path, failure=error.strerror or str(error))
    try:
        content = decode(data)
        return replace(_ported(path, content.text, settings, looks), content=content)
    except UnreadableError as error:
        failure = str(error)
    except cst.ParserSyntaxError as error:
        failure = _syntax(error, "" if path.suffix == ".ipynb" else decode(data).text)
    except RecursionError:
        failure = _TOO_DEEP
    except UnicodeEncodeError as error:
        failure = f"its encoding cannot hold the edit: {error}"
    except Exception as error:  # noqa: BLE001 - a fault of ours with one file must not keep the others from it
        failure = f"a bug in acclimate: {type(error).__name__}; please report it"
    facts = _of_refused(_code(path, data)) if path.suffix in _PROGRAMS else Facts()
    return FileResult(path, failure=failure, facts=facts)


def _refuse_deep(text: str) -> None:
    """Raises if libcst's native parser would crash on the source.

    Raises:
        UnreadableError: it is nested too deeply for Python's own parser too.
    """
    try:
        parse_as_python(text)
    except (MemoryError, RecursionError) as error:
        raise UnreadableError(_TOO_DEEP) from error
    except (SyntaxError, ValueError) as error:
        # libcst reports other errors: it may know a newer Python than this one.
        if "too many" in str(error) and "nested" in str(error):
            raise UnreadableError(_TOO_DEEP) from error


def _syntax(error: cst.ParserSyntaxError, text: str) -> str:
    first = str(error.message).splitlines()[0].rstrip(".")
    if text and _is_python(text):
        return f"Python can parse it, but libcst, with which acclimate reads it, cannot: {first}"
    return f"it is not valid Python 3: line {error.raw_line}: {first}"


def _is_python(text: str) -> bool:
    """Whether this Python can parse a text."""
    try:
        parse_as_python(text)
    except (SyntaxError, ValueError):
        return False
    return True


def _ported(path: Path, text: str, settings: Settings, looks: dict[str, Look] | None) -> FileResult:
    sys.setrecursionlimit(max(sys.getrecursionlimit(), _DEEPEST))
    if path.suffix in (".yaml", ".yml"):
        sites = tuple(
            Site("ACC701", "yaml", line, 1, said, Status.LEFT, True, "YAML is reported and not edited")
            for line, said in yaml_lines(text)
        )
        return FileResult(path, text, text, sites)
    if path.suffix != ".ipynb":
        if not settings.elsewhere:  # else it has been read before
            _refuse_deep(text)
        # What a package exports may be called inside an autocast of the CPU.
        known = replace(settings.survey, autocasts_on_host=True) if _is_in_package(path) else settings.survey
        settings = replace(settings, compiles_all=known.may_compile_all(path), survey=known.of_file(path))
        builds = known.is_for_builds(path) or is_build_script(path, text.encode())
        own, values = _of_source(text, settings, known)
        ported = port_text(text, settings, builds, path.name == "__init__.py", looks)
        facts = replace(ported.facts, outline=own)
        return FileResult(
            path, text, ported.text, ported.sites, facts=facts, values=values, loads=_loaded(ported.sites)
        )
    try:
        notebook = Notebook(text)
    except (ValueError, RecursionError) as error:
        raise UnreadableError(f"it is not a notebook that can be written back: {error}") from error
    _refuse_deep(notebook.source)
    own, values = _of_source(notebook.source, settings, settings.survey)
    ported = port_text(notebook.source, settings, looks=looks)
    sites = tuple(_in_cell(notebook, site) for site in ported.sites)
    after = text if ported.text == notebook.source else notebook.with_source(ported.text)
    facts, loads = replace(ported.facts, outline=own), _loaded(ported.sites)
    return FileResult(path, text, after, sites, facts=facts, values=values, loads=loads)


def _loaded(sites: Sequence[Site]) -> frozenset[int]:
    converted = (one for one in sites if one.safe and one.status is Status.CONVERTED)
    return frozenset(one.line for one in converted if one.code == "ACC307")


def _of_source(source: str, settings: Settings, known: Survey) -> tuple[Outline, Facts]:
    """A file's outline and values; empty ones where it is ported again, as these are known by then."""
    return (Outline(), Facts()) if settings.elsewhere else (outline(source), _values(source, known))


def _in_cell(notebook: Notebook, site: Site) -> Site:
    """A site with its cell, and with the lines that its reason names counted in their cells."""
    cell, line = notebook.cell_of(site.line)

    def in_its_cell(found: re.Match[str]) -> str:
        other, inside = notebook.cell_of(int(found[1]))
        return f"line {inside}" if other == cell else f"line {inside} of cell {other}"

    reason = _LINE.sub(in_its_cell, site.reason)
    return replace(site, line=line, reason=f"cell {cell}: {reason}" if reason else f"cell {cell}")


def usual_jobs() -> int:
    """The default number of processes: the cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1
