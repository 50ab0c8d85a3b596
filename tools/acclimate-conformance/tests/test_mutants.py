"""Every planted fault (in the modules that end in mutants.py) is found by the check for it."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from acclimate_conformance.runner.catalog import checks
from fresh_process import plain_environment
from warm_python import WarmPython

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import argument_mutants  # noqa: E402
import communication_mutants  # noqa: E402
import edge_mutants  # noqa: E402
import host_mutants  # noqa: E402
import mutants  # noqa: E402
import state_mutants  # noqa: E402
import value_mutants  # noqa: E402
from quick_faults import one_for_each  # noqa: E402

Examined: TypeAlias = Callable[..., list[dict[str, Any]]]
OF_THE_CPU = (
    mutants, state_mutants, value_mutants, argument_mutants, edge_mutants, host_mutants,
    communication_mutants,
)  # fmt: skip
LONG = {
    "ReducesNothing", "SpoiledByFork", "EndlessMemory", "LastLaunchedCount", "UnavailableAfterAFork",
    "OtherLaunchersCount", "CompileBackendOfAThread", "ClaimsDomains", "LimitIgnored",
    "FreeMemoryOfTheFirst", "LargeBlocks", "LargerBlocks", "DropoutRepeats", "OneDeviationForAll",
    "ConvolutionsKeepMemory", "SendsFloat32", "ExponentialOf24Bits", "LastSampleHasNoGradient",
    "GateHasAnotherSlope", "ScaleGrowsToInfinity", "DrawsOf32Bits", "NormalNumbersInPairs", "WeightsStayCast",
    "DrawsPlacesTwice", "LaunchedRankForgotten", "CrashesAtItsEnd", "LastNormalNumberRepeats",
    "ConversionsIntoGapsFillThem", "ToolkitDetectsAnomalies", "CountingDraws",
    "ResetByPlaceOnly", "EverySeventhNameIsEmpty", "LargeBlocksKept", "OneBlockIsKept",
    "BarrierOfDevicesReturns", "OthersMemoryIsFree", "LionSwapsItsDecays", "DroppedWorkIsCancelled",
    "GathersClearFirst", "ComplexNumbersAreHalved", "BuffersOfOneDtypeAreSent", "SendersAreUnknown",
    "DrawsAreNoChanges", "ImagesLoseTheirOrder", "IgnoresItsChildren", "SettingsStayHere",
    "CompiledResultsAreOne", "CompiledResultsAreOneInInference",
    "WeightsAreThoseOfTheCurrentDevice", "LongCopiesEndEarly",
    "RowsAreDrawnAlike", "LastOf16BitsIsNotSearched", "OneNumberIsAddedOnce", "StatisticsOf16Bits",
    "MeansOfHalvesOverflow",
    "MessagesAreSorted", "GeometricNumbersRepeat", "LastNaNIsTold", "StatisticsAreShared",
    "ShortMessagesAreLost", "LargeViewsAreNotChanged", "JoinsOnTheCurrentDevice",
    "SafetensorsOnTheCurrentDevice", "DrawsOf16Bits", "GradientsOfOneChannel", "SlopeOfAnotherElu",
    "FirstRowsChancesAreThoseOfAll", "WorkersDrawAlike", "GathersLowestBytes",
    "CompiledFunctionsAreKnownByTheirLength",
    "ErrorsOnStreamsKeepTheDevice", "FiguresEndStreams", "PinsWhereTensorsAreMade",
    "GrownViewsKeepTheirMemory",
    "PeaksOfThreadsStay", "InferenceDrawsAgain", "StatesOfOtherThreadsGoAstray", "ResetsOfOthersEndReplays",
    "RestoredStatesMissGraphs", "ReplaysOfThreadsKeepMemory", "DroppedGraphsKeepMemory", "ResetsEndReplays",
    "StreamsKeepTheProcess", "CapturesEndTheProcess", "PinnedMemoryHidesSignals", "RangesCloseTheDevice",
    "SentIntegersChange",
    "ReplaysOnOtherStreamsAreOne", "StreamsWaitAtHome", "SlicesAreLoadedAlone",
    "CompiledCheckpointsDrawAnew", "CompiledFunctionsKnowNoAutocast", "NumbersOfTheHostBeginTheirStorage",
    "DataOfCapturesChanges",
    "RankBeyondTheLast", "TruthsKeepMemory", "SortsLongRowsByBits", "TanhOfCellsIsSteeper",
    "SynchronizeMoves", "StridedPartsBeginTheStorage", "CompilesWrongly", "EventsMeasureSeconds",
    "ResultsRaiseAnotherError", "PlacesOfPoolsHave15Bits", "PlacesHave24Bits", "ChildrenLackTheDevice",
    "StridedDrawsIgnoreTheirGenerator", "ShiftsByNumbersReadTheirAddress",
    "SeedsNoForkedChild", "CompilersLeaveTheDevice", "StatesOfCheckpointsAreTheFirsts",
    "ColumnsTimesRowsAreOfTheFirstRows",
    "SamplesDrawAlike", "WeightsOfPlacesAreEqual", "ViewsAreNotChanged", "PlacesOf31Bits", "PlacesAreKept",
    "EventsMeasureNothing", "DeniesWhatFollows",
    "CollectingResetsPeaks", "PartsAreSentFromTheStart", "GathersOf64BitsHave32",
    *(mutant.__name__ for mutant in communication_mutants.CAUGHT_BY),
}  # fmt: skip
"""Faults whose checks take about a second of processor time or more."""
QUICK = one_for_each([module.CAUGHT_BY for module in OF_THE_CPU], LONG)
LIMIT_S = {False: 270, True: 840}
"""Less than a test's own time limit, so that what holds an examination up is named."""
EACH_LENGTH = pytest.mark.parametrize(
    "are_long", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["quick", "long"]
)
ON_SIM = (
    ("sim_mutants", ""), ("sim_mutants", "sync=check"), ("operator_mutants", ""), ("bounds_mutants", ""),
    ("program_mutants", ""), ("detail_mutants", ""), ("process_mutants", ""), ("walk_mutants", ""),
    ("combined_mutants", ""), ("extent_mutants", ""), ("interface_mutants", ""),
    ("walk_mutants", "sync=check"),
    *(pytest.param("sim_mutants", profile, marks=pytest.mark.slow) for profile in ("mps-like", "devices=2")),
)  # fmt: skip
"""Modules with faults of the emulated device, each with a profile."""
OF_THE_EMULATED_DEVICE = (
    "sim_mutants",
    "operator_mutants",
    "bounds_mutants",
    "program_mutants",
    "detail_mutants",
    "walk_mutants",
    "process_mutants",
    "combined_mutants",
    "extent_mutants",
    "interface_mutants",
)


@pytest.fixture(scope="module")
def examined(warm_python: WarmPython) -> Examined:
    """What the checks say of quick or other faults of the CPU, or of a profile of the emulated device.

    They share a process.
    """

    @cache  # a failure too, else each test would wait for it again
    def run(are_long: bool, *profile: str) -> subprocess.CompletedProcess[str]:
        environment = {**plain_environment(), "ACCLIMATE_SIM": "".join(profile)}
        if profile:
            environment["ACCLIMATE_ACCELERATOR"] = "sim"
        modules = OF_THE_EMULATED_DEVICE if profile else [module.__name__ for module in OF_THE_CPU]
        command = [
            sys.executable, "examine_mutants.py", str(LIMIT_S[are_long]), ",".join(modules),
            "long" if are_long else "quick", ",".join(sorted(LONG)), *profile,
        ]  # fmt: skip
        # Files, since a process that a check leaves behind would keep a pipe open.
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err, warm_python.in_place():
            ended = subprocess.run(command, cwd=HERE, env=environment, stdout=out, stderr=err)
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess(command, ended.returncode, out.read(), err.read())

    def examine(are_long: bool, *profile: str) -> list[dict[str, Any]]:
        ended = run(are_long, *profile)
        assert ended.returncode == 0, ended.stderr[-4000:]
        found: list[dict[str, Any]] = json.loads(ended.stdout)
        return found

    return examine


def require_found(result: dict[str, Any], fault: str | None) -> None:
    assert result["outcome"] == "failed", f"{result['check']} {result['outcome']} although {fault}"
    assert result["reason"], f"{result['check']} does not say what it saw"


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(mutant, marks=() if mutant in QUICK else pytest.mark.slow)
        for module in OF_THE_CPU
        for mutant in module.CAUGHT_BY
    ],
    ids=lambda mutant: mutant.__name__,
)
def test_the_check_finds_the_fault_in_the_cpu(mutant: type, examined: Examined) -> None:
    check = sys.modules[mutant.__module__].CAUGHT_BY[mutant]
    (found,) = [
        result
        for result in examined(mutant not in QUICK)
        if (result["module"], result["name"], result["check"]) == (mutant.__module__, mutant.__name__, check)
    ]
    require_found(found, mutant.__doc__)


@EACH_LENGTH
@pytest.mark.parametrize(("module", "profile"), ON_SIM)
def test_the_checks_find_the_faults_in_the_emulated_device(
    module: str, profile: str, are_long: bool, examined: Examined
) -> None:
    pytest.importorskip("acclimate_sim", reason="the emulated accelerator is not installed")
    found = [result for result in examined(are_long, profile) if result["module"] == module]
    faults = [result for result in found if not result["sound"]]
    assert faults or are_long or module in ("walk_mutants", "process_mutants", "extent_mutants")
    for result in faults:
        require_found(result, result["name"])


@EACH_LENGTH
def test_the_report_names_what_is_at_fault(are_long: bool, examined: Examined) -> None:
    pytest.importorskip("acclimate_sim", reason="the emulated accelerator is not installed")
    import combined_mutants  # needs the emulated accelerator

    told = {result["name"]: result["change"] for result in examined(are_long, "")}
    wanted = {name: at_fault for name, at_fault in combined_mutants.NAMED.items() if name in told}
    assert wanted
    for name, at_fault in wanted.items():
        named = told[name].removeprefix("operators on sim: ")
        assert named.startswith((f"{at_fault}:", f"{at_fault},", f"{at_fault} ")), f"{name}: {told[name]}"


@EACH_LENGTH
@pytest.mark.parametrize(
    ("module", "profile"),
    [("argument_mutants", ()), ("sim_mutants", ("",)), ("operator_mutants", ("",))],
    ids=["argument_mutants", "sim_mutants", "operator_mutants"],
)
def test_what_is_unusual_but_right_fails_no_check(
    module: str, profile: tuple[str, ...], are_long: bool, examined: Examined
) -> None:
    if profile:
        pytest.importorskip("acclimate_sim", reason="the emulated accelerator is not installed")
    found = [result for result in examined(are_long, *profile) if result["module"] == module]
    sound = [result for result in found if result["sound"]]
    assert are_long or any(result["outcome"] == "passed" for result in sound)
    for result in sound:
        assert result["outcome"] != "failed", f"{result['name']}, {result['check']}: {result['reason']}"


def test_faults_are_planted_in_every_category() -> None:
    categories = {check.partition("/")[0] for check in mutants.CAUGHT_BY.values()}
    assert categories == {check.category for check in checks()}
    assert all(mutant.__doc__ for mutant in mutants.CAUGHT_BY)
