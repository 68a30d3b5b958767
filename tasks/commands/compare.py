"""`report --compare A B`: the difference between two policies on their shared problems; no model runs.

Each is a run's folder (its best snapshot), a file of trajectories or a registered version. Prints a table and writes
the trajectory browser.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.commands.outputs import refuse_to_replace
from tasks.commands.policies import Source, find_policy
from tasks.core.records import Trajectory
from tasks.core.settings import Settings, load, load_paths, read_params
from tasks.core.text import counted, printable
from tasks.core.workspace import as_shell_sees
from tasks.measurement.points import level_text
from tasks.rewards.stored import read_trajectories
from tasks.stages.evaluate.reflexion import FILES
from tasks.stages.evaluate.settings import EvaluateSettings

if TYPE_CHECKING:
    from rich.table import Table

    from tasks.core.console import SafeConsole

NAMES = ("a", "b")  # of the two columns in links of the page, unless the page has colours for both policies' names
STYLES = {"better": "green", "worse": "red", "unclear": ""}  # how the terminal shows a difference
Sides = tuple[list[Trajectory], list[Trajectory]]
UNBOUNDED = 1 << 20  # columns: wider than any table
COLOURED = {"base", "warm_start", "best", "frontier"}


class CompareSections(Settings):
    evaluate: EvaluateSettings


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two policies on their shared problems. `difference` is B's success minus A's; `by_category`: `compare_each`."""

    results: Sequence[Mapping[str, Any]]
    difference: Mapping[str, Any]
    by_category: Mapping[str, Mapping[str, Any]]
    category_confidence: float
    notes: Sequence[str]


def compare(references: tuple[str, str], out: Path | None, console: SafeConsole) -> None:
    """Print the tables and build the browser in `out` (None: artifacts/compare)."""
    from tasks.report.browser import Policy, build_browser

    params = read_params()
    settings, paths = load(CompareSections, params), load_paths(params)
    folder = out or paths.artifacts / "compare"
    sources = [find_policy(reference, paths) for reference in references]
    refuse_another_folder(folder, sources)
    labels = tell_apart([source.label for source in sources], references)
    compared = compare_trajectories(sources, labels, confidence=settings.evaluate.confidence)
    own_names = {source.name for source in sources}
    names = [source.name for source in sources] if len(own_names & COLOURED) == 2 else NAMES
    policies = [
        Policy(name, label, source.trajectories, source.model)
        for name, label, source in zip(names, labels, sources, strict=True)
    ]
    page = build_browser(folder, policies, title=f"{labels[0]} against {labels[1]}")
    print_comparison(compared, labels, settings.evaluate.confidence, console)
    console.print(f"\n{as_shell_sees(page)}", soft_wrap=True)


def refuse_another_folder(folder: Path, sources: Sequence[Source] = ()) -> None:
    refuse_to_replace(
        folder,
        kind="a comparison",
        is_own=_is_comparison,
        remedy="Name a new folder with --out.",
        is_folder=True,
        reads=[source.trajectories for source in sources],
    )


def _is_comparison(folder: Path) -> bool:
    """Whether it is empty, or has the browser's page and only files of the browser: your own folder may have `data`."""
    from tasks.report.browser import files_of_browser

    names = {item.name for item in folder.iterdir()} if folder.is_dir() else {""}
    return not names or ("trajectories.html" in names and names <= files_of_browser())


def tell_apart(labels: Sequence[str], references: Sequence[str]) -> list[str]:
    if len(set(labels)) == 2:
        return list(labels)
    longer = [f"{label} ({reference})" for label, reference in zip(labels, references, strict=True)]
    if len(set(longer)) == 2:
        return longer
    return [f"{label} ({name.upper()})" for label, name in zip(labels, NAMES, strict=True)]


def compare_trajectories(sources: Sequence[Source], labels: Sequence[str], *, confidence: float) -> Comparison:
    from tasks.measurement.statistics import paired_difference, summarise

    first, second = (
        [_light(item) for _, item in read_trajectories(source.trajectories, is_only_shown=True)] for source in sources
    )
    for source, side in zip(sources, (first, second), strict=True):
        refuse_attempts(source.trajectories, side)
    shared = shared_problems(first, second, [source.trajectories for source in sources])
    sides = [[item for item in side if item.problem_id in shared] for side in (first, second)]
    by_category, of_each = compare_categories(*sides, confidence=confidence)
    return Comparison(
        results=[summarise(side, confidence=confidence) for side in sides],
        difference=_with_word(paired_difference(sides[1], sides[0], confidence=confidence), confidence),
        by_category=by_category,
        category_confidence=of_each,
        notes=[*_left_out(first, second, shared, labels), *_other_environments(sides, labels)],
    )


def compare_categories(
    first: list[Trajectory], second: list[Trajectory], *, confidence: float
) -> tuple[dict[str, dict[str, Any]], float]:
    """`compare_each` of the categories that both were measured in, with both success rates."""
    from tasks.measurement.statistics import success_rate

    sides: dict[str, Sides] = {}
    for category in sorted({item.category for item in (*first, *second)}):
        ours, theirs = ([item for item in side if item.category == category] for side in (first, second))
        if _problems(ours) == _problems(theirs) and _have_measured(ours, theirs):
            sides[category] = ours, theirs
    rows, of_each = compare_each(sides, confidence=confidence)
    for category, row in rows.items():
        row["rates"] = [success_rate(side) for side in sides[category]]
    return rows, of_each


def compare_each(sides: Mapping[str, Sides], *, confidence: float) -> tuple[dict[str, dict[str, Any]], float]:
    """Under each name the second side's success minus the first's, and the confidence of each interval.

    p-values are adjusted by Holm (`p_adjusted`), intervals by Bonferroni: of equal sides at most 1 − confidence show
    even one as better or worse.
    """
    from tasks.measurement.significance import holm
    from tasks.measurement.statistics import paired_difference

    of_each = 1 - (1 - confidence) / max(1, len(sides))
    rows = {name: paired_difference(second, first, confidence=of_each) for name, (first, second) in sides.items()}
    adjusted = holm({name: row["p_value"] for name, row in rows.items()})
    return {name: _with_word({**row, "p_adjusted": adjusted[name]}, confidence) for name, row in rows.items()}, of_each


def refuse_attempts(file: Path, played: Sequence[Trajectory]) -> None:
    """ValueError for the attempts of `evaluate.reflexion`: as samples, a problem solved by the second would be half."""
    if file.stem in FILES and any(item.draw for item in played):
        raise ValueError(
            f"{file}: contains attempts at a problem until one succeeds, which are no samples of one policy, so their "
            f"mean would be wrong. Read `reflexion` in evaluation.json, which compares them as attempts; or name the "
            f"policy's file test_….jsonl."
        )


def shared_problems(first: list[Trajectory], second: list[Trajectory], files: Sequence[Path]) -> set[str]:
    """Ids of the problems that both met; ValueError where one id is of two problems, since the data then differ."""
    ours, theirs = ({item.problem_id: item for item in side} for side in (first, second))
    for side, file in ((first, files[0]), (second, files[-1])):
        if not side:
            raise ValueError(
                f"{file}: contains no trajectories, so nothing can be compared. Name a file of a stage that played "
                f"episodes."
            )
    shared = ours.keys() & theirs.keys()
    where = " and ".join(str(file) for file in files)
    if not shared:
        raise ValueError(
            f"{where}: share no problem, so nothing can be compared. Name two policies that played the same problems."
        )
    different = [problem for problem in sorted(shared) if not _is_one_problem(ours[problem], theirs[problem])]
    if different:
        raise ValueError(
            f"{where}: {len(different)} of their problems (such as {different[0]!r}) have the same id but another "
            f"request, so they come from different data and cannot be paired. Name two policies that played the same "
            f"problems."
        )
    return shared


def _is_one_problem(ours: Trajectory, theirs: Trajectory) -> bool:
    return ours.is_of(request=theirs.request, category=theirs.category, split_group=theirs.split_group)


def print_comparison(compared: Comparison, labels: Sequence[str], confidence: float, console: SafeConsole) -> None:
    """The names are above their table where a word of them is too long for it: no path is broken."""
    names = [f"{name.upper()}  {printable(label)}" for name, label in zip(NAMES, labels, strict=True)]
    table = _policies_table(compared, names, confidence)
    if console.measure(table, options=console.options.update(max_width=UNBOUNDED)).minimum > console.width:
        console.print("\n".join([*names, ""]), soft_wrap=True)
        table = _policies_table(compared, [name.upper() for name in NAMES], confidence)
    console.print(table)
    console.print()
    console.print(_differences_table(compared, confidence))
    if len(compared.by_category) > 1:
        console.print(
            f"· the p of categories is adjusted by Holm for {len(compared.by_category)}; their intervals are joint "
            f"(each at {level_text(compared.category_confidence)})."
        )
    for note in compared.notes:
        console.print(f"· {note}")


def _policies_table(compared: Comparison, names: Sequence[str], confidence: float) -> Table:
    from tasks.report.results import interval, percent
    from tasks.report.summary import new_table

    columns = ("success", f"{level_text(confidence)} interval", "problems", "samples", "tokens", "calls", "invalid")
    table = new_table("Shared problems", *columns)
    for name, result in zip(names, compared.results, strict=True):
        table.add_row(
            name,
            percent(result["success_rate"]),
            interval(dict(result)),
            str(result["num_problems"]),
            str(result["samples_per_problem"]),
            f"{result['mean_sampled_tokens']:.1f}" if result["mean_sampled_tokens"] else "–",
            f"{result['mean_calls']:.1f}",
            percent(result["invalid_call_share"]),
        )
    return table


def _differences_table(compared: Comparison, confidence: float) -> Table:
    """In percentage points, with a word for the p-value."""
    from tasks.report.summary import new_table

    table = new_table("B minus A", "points", f"{level_text(confidence)} interval", "p", "problems", "")
    for name, row in [("all categories", compared.difference), *compared.by_category.items()]:
        numbers = [f"{100 * row['difference']:+.1f}", f"{100 * row['ci_low']:+.1f} to {100 * row['ci_high']:+.1f}"]
        numbers += [p_text(row), str(row["num_problems"])]
        style = "bold" if row is compared.difference else None
        table.add_row(printable(name), *numbers, row["word"], style=style)
    return table


def p_text(row: Mapping[str, Any]) -> str:
    return f"{_p_value(row):.3g}"


def _p_value(row: Mapping[str, Any]) -> float:
    """Adjusted where it is one of several."""
    return float(row.get("p_adjusted", row["p_value"]))


def _with_word(row: Mapping[str, Any], confidence: float) -> dict[str, Any]:
    if _p_value(row) > 1 - confidence:
        return {**row, "word": "unclear"}
    return {**row, "word": "better" if row["difference"] > 0 else "worse"}


def _left_out(first: list[Trajectory], second: list[Trajectory], shared: set[str], labels: Sequence[str]) -> list[str]:
    counts = [len(_problems(side) - shared) for side in (first, second)]
    return [
        f"Left out: {counted(count, 'problem')} that only {label} played."
        for count, label in zip(counts, labels, strict=True)
        if count
    ]


def _other_environments(sides: Sequence[list[Trajectory]], labels: Sequence[str]) -> list[str]:
    fingerprints = [{item.environment_fingerprint for item in side} for side in sides]
    if fingerprints[0] == fingerprints[1]:
        return []
    told = (
        f"{label}: {', '.join(sorted(item[:12] for item in found))}"
        for label, found in zip(labels, fingerprints, strict=True)
    )
    return [
        f"They were played in different versions of the environment, which may explain the "
        f"difference ({'; '.join(told)})."
    ]


def _problems(trajectories: list[Trajectory]) -> set[str]:
    return {item.problem_id for item in trajectories}


def _have_measured(*sides: list[Trajectory]) -> bool:
    measured = [_problems([item for item in side if not item.is_lost]) for side in sides]
    return bool(set.intersection(*measured))


def _light(trajectory: Trajectory) -> Trajectory:
    """Tokens replaced by their count: two whole evaluations may not fit in memory."""
    for sequence in trajectory.sequences:
        sequence.sampled_mask = [True] * sequence.num_sampled_tokens
        sequence.token_ids, sequence.sampler_logp, sequence.token_versions = [], [], []
    return trajectory
