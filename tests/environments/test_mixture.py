"""mixture: each problem is played in the environment it is from, with the budgets of that environment."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.chat.format import load_chat
from tasks.core.records import Problem, ReferenceTurn
from tasks.core.settings import load
from tasks.engines.scripted.scripts import ScriptedEngine
from tasks.environments.catalog import load_environment
from tasks.environments.mixture.environment import Mixture, divide_by_share, in_mixture, member_of, own_problem
from tasks.environments.settings import EnvironmentSettings
from tasks.learning.grpo.curriculum import ProblemSampler
from tasks.report.chart_panels import measured_panels, value_of
from tasks.rollouts.budgets import Size, fit
from tasks.rollouts.conversation import EpisodeKey
from tasks.rollouts.episode import EngineEpisodes
from tasks.stages.train.groups import success_by_environment
from tasks.stages.train.run import TrainingRun
from tasks.stages.train.settings import TrainSections
from tasks.tools.replay import Script, play
from tasks.tools.retries import RetryingEnvironment
from tasks.tracking.metrics import row_points
from tests import tiny
from tests.contracts.test_environments import load_page_module
from tests.environments import mcp_server
from tests.learning.rows import a_group
from tests.pipeline.training_worker import unwatched
from tests.profiles import profile_params
from tests.readme import page_block
from tests.worlds import NO_BUDGETS, environment_settings, member

SHOP = {"object": "tasks.custom.page_shop:Shop", "shelf_size": 9}


@pytest.fixture(autouse=True)
def shop() -> None:
    load_page_module("tasks.custom.page_shop", page_block("tasks/custom/README.md", "python", "class Shop"))


def section(**of_shop: Any) -> EnvironmentSettings:
    """Three problems of the travel desk to one of the shop."""
    members = [member("travel_desk", share=3.0, max_level=1), member("custom", SHOP, **of_shop)]
    return environment_settings("mixture", settings={"members": members})


def mixture(**of_shop: Any) -> Mixture:
    found = load_environment(section(**of_shop))
    assert isinstance(found, Mixture)
    return found


def problems(world: Mixture, count: int = 8) -> list[Problem]:
    return list(world.generate(seed=1, num_problems=count, max_level=3))


def test_each_member_writes_its_share_and_its_name_begins_ids_categories_and_split_groups():
    found = problems(mixture())
    assert Counter(member_of(problem.id) for problem in found) == {"travel_desk": 6, "custom": 2}
    for problem in found:
        name = member_of(problem.id)
        assert problem.category.startswith(f"{name}/") and problem.split_group.startswith(f"{name}/")
    assert {problem.level for problem in found} == {1}  # each member's own max_level, or curate's


@pytest.mark.parametrize(
    ("number", "shares", "parts"),
    [
        (5, [1, 1], [3, 2]),
        (300, [2, 1], [200, 100]),
        (100, [1, 1, 1], [34, 33, 33]),
        (10, [6, 3.4, 0.6], [6, 3, 1]),  # the exact parts; .4 and .6 are left, for one problem
        (4, [100, 1, 1, 1], [1, 1, 1, 1]),
        (2, [1, 1, 1], [1, 1, 1]),
    ],
)
def test_shares_are_by_largest_remainder_and_at_least_one(number: int, shares: list[float], parts: list[int]):
    assert [*divide_by_share(number, dict(zip("abcd", shares, strict=False))).values()] == parts


@given(st.integers(1, 300), st.lists(st.floats(0.01, 100), min_size=1, max_size=6))
@settings(deadline=None)
def test_shares_add_up_and_each_is_within_one_of_its_part(number: int, shares: list[float]):
    exact = [number * share / sum(shares) for share in shares]
    parts = [*divide_by_share(number, dict(enumerate(shares))).values()]  # type: ignore[arg-type]
    assert sum(parts) == max(number, len(shares)) and min(parts) >= 1
    if min(exact) >= 1:  # else what one gets too much, another one lacks
        assert all(abs(part - own) < 1 for part, own in zip(parts, exact, strict=True))


@given(st.text(min_size=1), st.text(min_size=1), st.text(min_size=1))
@settings(deadline=None)
def test_a_problem_comes_back_as_its_environment_wrote_it(name: str, category: str, group: str):
    """Whatever an id contains, slashes too."""
    own = Problem(
        id=name, category=category, level=1, requests=["x"], world={}, split_group=group,
        reference=[ReferenceTurn(calls=[], answer="")],
    )  # fmt: skip
    assert own_problem(in_mixture(own, "bfcl")) == own


def test_a_model_is_shown_the_tools_of_the_problems_environment_alone_and_calls_no_other():
    world = mixture()
    desk, shop = problems(world)[0], problems(world)[-1]
    assert [tool.name for tool in world.tools_for(shop)] == ["count", "order"]
    assert "count" not in [tool.name for tool in world.tools_for(desk)]
    (reply,) = [world.start(desk).call("count", {"product": "nuts"})]
    assert reply.error == "unknown_tool"  # type: ignore[union-attr]


def test_a_problem_of_no_member_is_refused_with_the_names_that_there_are():
    stray = problems(mixture())[0].model_copy(update={"id": "elsewhere/7"})
    with pytest.raises(ValueError, match=r"Begin its id with one of: travel_desk/, custom/"):
        mixture().start(stray)


def test_each_member_is_within_retries_of_its_own():
    """So tools of one name in two members are each repeated as their own environment allows."""
    assert all(isinstance(found, RetryingEnvironment) for found in mixture().members.values())


def test_an_expert_demonstrates_or_else_the_reference_and_the_demonstration_names_the_mixtures_problem():
    world = mixture()
    expert = world.expert()
    assert expert is not None
    for problem in problems(world):
        shown = expert(problem, random.Random(0))
        if shown is not None:
            assert shown.problem_id == problem.id
            world.thoughts(shown)
    shown = expert(problems(world)[-1], random.Random(0))  # the shop has no expert
    assert shown is not None
    assert [len(replies) for replies in shown.replies] == [1, 1, 0]


def two_shops(*labels: str | None) -> EnvironmentSettings:
    shelves = [{**SHOP, "shelf_size": size} for size in (1, 9)]
    members = [member("custom", shelf, label=label) for shelf, label in zip(shelves, labels, strict=True)]
    return environment_settings("mixture", settings={"members": [*members, member("travel_desk", max_level=1)]})


def test_two_classes_of_ones_own_are_told_by_their_labels():
    world = load_environment(two_shops("corner", "mall.2"))
    assert isinstance(world, Mixture)
    found = problems(world, 9)
    assert Counter(member_of(problem.id) for problem in found) == {"corner": 3, "mall.2": 3, "travel_desk": 3}
    assert {problem.category.partition("/")[0] for problem in found} == {"corner", "mall.2", "travel_desk"}
    sizes = [world.members[name].describe()["settings"]["shelf_size"] for name in ("corner", "mall.2")]
    assert sizes == [1, 9]
    corner = next(problem for problem in found if member_of(problem.id) == "corner")
    assert world.member_of(corner.id) == "corner" and "count" in [tool.name for tool in world.tools_for(corner)]
    description = world.describe()
    assert [*description["members"]] == [*description["budgets"]] == ["corner", "mall.2", "travel_desk"]
    section = two_shops("corner", "mall.2")
    assert section.further_code() == ["tasks/environments/custom", "tasks/environments/travel_desk"]


def test_a_label_that_is_the_name_changes_nothing():
    """So a mixture without labels keeps the ids and the fingerprint that it had."""
    plain, told = mixture(), mixture(label="custom")
    assert (problems(plain), plain.fingerprint()) == (problems(told), told.fingerprint())
    assert mixture(label="shop").fingerprint() != plain.fingerprint()


@pytest.mark.slow
def test_two_mcp_servers_are_two_members_each_with_its_own_sessions():
    hotel = mcp_server.environment_settings().settings
    assert hotel is not None
    row = hotel.model_dump(mode="json")
    pair = [member("mcp", row, label="hotel"), member("mcp", {**row, "allowed_tools": ["price", "book"]}, label="inn")]
    world = load_environment(environment_settings("mixture", settings={"members": pair}))
    assert isinstance(world, Mixture)
    with closing(world):
        (own,) = mcp_server.problems(1)
        shown = [len(world.tools_for(in_mixture(own, name))) for name in ("hotel", "inn")]
        played = play(world, [Script.reference(in_mixture(own, name)) for name in ("hotel", "inn")])
    assert shown == [3, 2]
    assert [item.verdict is not None and item.verdict.success for item in played] == [True, True]


@pytest.mark.parametrize(
    ("members", "says"),
    [
        ([member("travel_desk"), member("travel_desk")], "travel_desk is there twice"),
        ([member("travel_desk"), member("travel_desk")], "Give each a label of its own, such as label: travel_desk-2"),
        ([member("travel_desk", label="x"), member("custom", SHOP, label="x")], "x is there twice"),
        ([member("travel_desk"), member("custom", SHOP, label="travel_desk")], "travel_desk is there twice"),
        ([member("travel_desk", label="a/b")], "label"),
        ([member("nowhere")], "there is no folder 'nowhere'"),
        ([member("travel_desk", share=0.0)], "greater than 0"),
        ([member("travel_desk", source="rows.jsonl")], "is not in tasks/custom/"),
        ([member("travel_desk", {"x": 1})], "travel_desk has no settings"),
        ([], "at least 1"),
    ],
)
def test_a_mistake_in_a_member_is_one_line_that_names_it(members: list[Any], says: str):
    params = profile_params("test")
    params["environment"] |= {"name": "mixture", "settings": {"members": members}}
    with pytest.raises(ValueError, match=r"environment\.settings\.members") as error:
        load(TrainSections, params)
    assert says in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_a_members_budget_bounds_its_episodes_and_one_above_samplings_is_refused(tmp_path: Path):
    chat = load_chat(tiny.model_folder(tmp_path))
    world = mixture(budgets={**NO_BUDGETS, "max_turns": 2, "max_tokens_per_episode": 90})
    kind = EngineEpisodes(ScriptedEngine([], end_of_turn=0), chat, tiny.SAMPLING)

    def opened(problem: Problem, world: Mixture = world) -> Any:
        return kind.open(EpisodeKey(problem, 0, 0), world, seed=1, stage="test", attempt=0)

    desk, shop = opened(problems(world)[0]), opened(problems(world)[-1])
    assert (desk.sampling, desk.token_limit) == (tiny.SAMPLING, 200)
    assert (shop.sampling.max_turns, shop.sampling.max_tokens_per_turn, shop.token_limit) == (2, 24, 90)
    greedy = mixture(budgets={**NO_BUDGETS, "max_turns": 5})
    with pytest.raises(ValueError, match=r"max_turns is 5, above sampling.max_turns = 4.* Raise sampling.max_turns"):
        opened(problems(greedy)[-1], greedy)


def test_references_are_measured_against_the_budgets_of_their_environment():
    needs = {"max_turns": 3, "max_tokens_per_turn": 5, "max_tokens_per_episode": 50, "max_completion_tokens": 40}
    roomy, tight = Size("a", "a", needs), Size("b", "b", needs, {"max_turns": 2})
    found = fit([roomy, tight], tiny.SAMPLING)  # 4 turns
    assert ([size.problem_id for size in found.cut], found.limits["max_turns"]) == (["b"], 2)
    assert not fit([roomy], tiny.SAMPLING).cut


def test_success_by_environment_is_of_the_groups_that_success_is_of():
    """Drawn first, 3 of 4 succeed; what replaced a group without signal, with 1 of 4, is in neither number."""
    first = a_group(1, [1.0, 1.0, 1.0, 0.0], ["success", "success", "success", "failure"])
    instead = a_group(2, [1.0, 0.0, 0.0, 0.0], ["success", "failure", "failure", "failure"], round_number=1)
    groups = [replace(group, problem_id=f"custom/{group.problem_id}") for group in (first, instead)]
    assert success_by_environment(groups, mixture()) == {"success_by_environment": {"custom": 0.75}}


def test_success_by_environment_is_a_curve_in_metrics_and_on_the_chart():
    rows = [
        {"iteration": 1, "success_by_environment": {"a": 0.5}},
        {"iteration": 2, "success_by_environment": {"b": 1.0}},
    ]
    assert [(point.key, point.value) for row in rows for point in row_points(row, "iteration")] == [
        ("success_by_environment/a", 0.5), ("success_by_environment/b", 1.0),
    ]  # fmt: skip
    first, second = measured_panels(rows)
    assert (first.name, second.name) == ("a", "b")
    assert value_of(rows[0], first) == 0.5
    assert value_of(rows[1], first) != value_of(rows[1], first)  # NaN: not drawn then


@pytest.mark.slow
def test_a_run_trains_on_both_and_says_how_each_went(tmp_path: Path):
    params = profile_params("test")
    params["environment"] = section().model_dump(mode="json")
    params["sampling"]["max_tokens_per_episode"] = 120
    params["train"] |= {
        "num_iterations": 2, "problems_per_iteration": 8, "group_size": 2, "problem_sampler": "uniform",
        "snapshot_interval": 2, "checkpoint_interval": 2, "zero_variance_groups": "keep",
    }  # fmt: skip
    params["sentinel"] |= unwatched(params["sentinel"])
    options, rows = load(TrainSections, params), problems(mixture(), 16)
    run = TrainingRun(options, start=tiny.model_folder(tmp_path / "model"), problems=rows, resume=tmp_path / "resume")
    try:
        metrics = [run.iterate()[0] for _ in range(2)]
    finally:
        run.close()
    drawn = ProblemSampler(rows, options.train, seed=options.seed)
    for number, row in enumerate(metrics, start=1):
        names = {member_of(problem.id) for problem in drawn.draw(number, 0, 8)}
        assert set(row["success_by_environment"]) == names
    assert {name for row in metrics for name in row["success_by_environment"]} == {"travel_desk", "custom"}
