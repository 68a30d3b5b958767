"""tau2's telecom: the package's problems and verdicts; every expert wins, silence never, no fault is on two sides."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from tasks.core.records import Problem, ToolCall
from tasks.environments.tau2 import experts
from tasks.environments.tau2.package import load_module, read_splits, read_tasks, tools_class
from tasks.environments.tau2.problems import ANSWER, faults, problems
from tasks.environments.tau2.settings import Problems, Tau2Settings
from tasks.environments.tau2.telecom import HARMLESS, Telecom, TelecomEpisode
from tasks.environments.tau2.tools import DONE, NAMES, all_tools, read_docstring
from tasks.stages.curate.splitting import SPLITS, keyed_hash, side_of
from tasks.tools.base import ToolReply, Verdict, block_until
from tests.environments.tau2_package import package_verdict
from tests.worlds import QUICK, environment_settings

pytestmark = pytest.mark.slow

WORLD = Telecom(QUICK)
DONE_CALL = ToolCall(name=DONE.name, arguments={})
TASKS = {task["id"]: task for task in read_tasks("telecom")}


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


def played(problem: Problem, calls: Sequence[ToolCall]) -> tuple[TelecomEpisode, list[ToolReply], Verdict]:
    episode = WORLD.start(problem)
    replies = [block_until(episode.call(item.name, item.arguments)) for item in calls]
    return episode, replies, episode.verdict(ANSWER)


def solution(problem: Problem) -> list[ToolCall]:
    return list(problem.reference[0].calls)


def with_id(start: str) -> Problem:
    return next(problem for id, problem in problems().items() if id.startswith(start))


ROAMING = with_id("[mobile_data_issue]user_abroad_roaming_enabled_off[")
LOCKED = with_id("[service_issue]lock_sim_card_pin[")


# The contract


def test_the_expert_solves_2285_of_2285_and_done_alone_none() -> None:
    """The issue says that doing nothing solves 32. In these the fault cannot be repaired, so the state is right at
    once; but they also ask for a transfer to a human, which nobody makes who does nothing.
    """
    solved, states, silent = 0, 0, 0
    for problem in problems().values():
        solved += played(problem, solution(problem))[2].success
        verdict = played(problem, [DONE_CALL])[2]
        states, silent = states + verdict.checks["assertions"], silent + verdict.success
    assert (len(problems()), solved, states, silent) == (2285, 2285, 32, 0)


def test_harmless_fixes_without_a_look_solve_36() -> None:
    won = [problem.category for problem in problems().values() if played(problem, [*HARMLESS, DONE_CALL])[2].success]
    assert {name: won.count(name) for name in set(won)} == {
        "mms_issue": 30,
        "mobile_data_issue": 3,
        "service_issue": 3,
    }


def test_verdicts_are_those_of_the_packages_own_scorer() -> None:
    """60 of the problems, each as the expert plays it, with a call left out, with one more, and in another order."""
    rng, agreed = random.Random(5), []
    for problem in rng.sample(list(problems().values()), 60):
        calls = solution(problem)[:-1]
        left_out = rng.randrange(len(calls))
        variants = (
            calls,
            calls[:left_out] + calls[left_out + 1 :],
            [*calls, rng.choice(EXTRA)],
            rng.sample([*calls, rng.choice(EXTRA)], len(calls) + 1),
        )
        for variant in variants:
            ours = played(problem, [*variant, DONE_CALL])[2].success
            assert ours == package_verdict(TASKS[problem.id], variant), (problem.id, variant)
            agreed.append(ours)
    assert 60 < sum(agreed) < len(agreed) - 60  # neither verdict is rare


EXTRA = (
    call("toggle_airplane_mode"), call("toggle_data"), call("toggle_roaming"), call("toggle_wifi_calling"),
    call("reboot_device"), call("suspend_line", customer_id="C1001", line_id="L1002", reason="asked"),
    call("refuel_data", customer_id="C1001", line_id="L1002", gb_amount=1.5), call("make_payment"),
    call("transfer_to_human_agents", summary="more"), call("connect_vpn"), call("unknown_tool"),
)  # fmt: skip


# Episodes


def test_the_state_decides_and_done_closes_it() -> None:
    fix = call("toggle_roaming")
    assert played(ROAMING, [fix, DONE_CALL])[2].checks == {"done": True, "assertions": True, "actions": True}
    assert played(ROAMING, [fix])[2].checks == {"done": False, "assertions": True, "actions": True}
    assert not played(ROAMING, [fix])[2].success
    _, replies, verdict = played(ROAMING, [DONE_CALL, fix])
    assert (replies[1].valid, replies[1].error) == (False, "conflict")
    assert verdict.details == {
        "failed_assertions": ["assert_mobile_data_status", "assert_internet_speed"],
        "missing_actions": [],
    }
    assert not played(ROAMING, [fix, fix, DONE_CALL])[2].success  # on, and off again


def test_a_transfer_is_asked_for_where_nothing_can_be_repaired_and_counts_before_done_only() -> None:
    transfer = call("transfer_to_human_agents", summary="The SIM is locked.")
    assert played(LOCKED, [transfer, DONE_CALL])[2].success
    verdict = played(LOCKED, [DONE_CALL, transfer])[2]
    assert verdict.checks == {"done": True, "assertions": True, "actions": False}
    assert verdict.details["missing_actions"] == ["transfer_to_human_agents"]


def test_the_company_and_the_phone_learn_of_each_other() -> None:
    """A bill is requested by the company, paid on the phone, and then the line can be resumed."""
    problem = with_id("[service_issue]overdue_bill_suspension[")
    names = [item.name for item in solution(problem)]
    assert names[:3] == ["send_payment_request", "make_payment", "resume_line"]
    episode, _, _ = played(problem, solution(problem)[:2])
    (bill,) = [
        item for item in episode.world.tools.db.bills if item.bill_id == solution(problem)[0].arguments["bill_id"]
    ]
    assert bill.status.value == "Paid"


def test_a_new_bill_has_the_same_id_in_every_episode() -> None:
    refuel = call("refuel_data", customer_id="C1001", line_id="L1002", gb_amount=2.0)
    look = call("get_bills_for_customer", customer_id="C1001")
    first, second = (played(ROAMING, [refuel, look, refuel, look])[1] for _ in range(2))
    assert first == second and all(reply.valid for reply in first)
    bills = [{bill["bill_id"] for bill in json.loads(first[place].text)} for place in (1, 3)]
    assert bills[0] == bills[1]


def test_a_wrong_call_is_answered_in_the_packages_words() -> None:
    customer = played(ROAMING, [call("get_customer_by_id", customer_id="C9")])[1][0]
    assert (customer.error, "Customer with ID C9 not found" in customer.text) == ("not_found", True)
    settings = played(ROAMING, [call("set_apn_settings", apn_settings={"apn_name": "nowhere"})])[1][0]
    assert (settings.valid, settings.error) == (False, "invalid_arguments")
    private = played(ROAMING, [call("_toggle_roaming"), call("turn_roaming_on"), call("initialize")])[1]
    assert {reply.error for reply in private} == {"unknown_tool"}


def test_what_is_marked_read_only_changes_nothing() -> None:
    given = {
        "phone_number": experts.PHONE, "customer_id": "C1001", "line_id": "L1002", "id": "L1002", "limit": 2,
        "app_name": "messaging", "full_name": "John Smith", "dob": "1985-06-15",
    }  # fmt: skip
    read_only = [tool for tool in all_tools() if tool.read_only]
    assert len(read_only) == 21
    for problem in random.Random(1).sample(list(problems().values()), 20):
        episode = WORLD.start(problem)
        before = [vars(side)["db"].get_hash() for side in (episode.world.tools, episode.world.user_tools)]
        for tool in read_only:
            arguments = {name: given[name] for name in tool.parameters["properties"]}
            assert block_until(episode.call(tool.name, arguments)).valid
        assert [vars(side)["db"].get_hash() for side in (episode.world.tools, episode.world.user_tools)] == before


# Problems, splits, tools


def test_no_set_of_faults_is_on_two_sides_of_any_split() -> None:
    groups: dict[str, list[str]] = {}
    for problem in problems().values():
        groups.setdefault(json.dumps(faults(TASKS[problem.id])), []).append(problem.split_group)
    assert len(groups) == 2253 and all(len(set(names)) == 1 for names in groups.values())
    assert len({names[0] for names in groups.values()}) == 2253
    for seed in range(3):
        sides = [{side_of(name, seed=seed, train_share=0.7) for name in names} for names in groups.values()]
        assert all(len(side) == 1 for side in sides)
        assert {name for side in sides for name in side} == set(SPLITS)
    assert keyed_hash(1, "train", "a") == keyed_hash(1, "train", "a")
    train, test = ({problems()[id].split_group for id in half} for half in WORLD.published_halves())
    assert (len(train), len(test), train & test) == (74, 40, set())


def test_the_official_splits_are_the_packages() -> None:
    sizes: dict[Problems, int] = {"full": 2285, "base": 114, "small": 20}
    for name, size in sizes.items():
        world = Telecom(QUICK, Tau2Settings(domain="telecom", problems=name))
        made = list(world.generate(seed=1, num_problems=9999, max_level=99))
        assert {problem.id for problem in made} == set(read_splits("telecom")[name])
        assert len(made) == size == world.count_source(seed=1, num_problems=9999, max_level=99).num_problems
    few = world.count_source(seed=1, num_problems=3, max_level=4)
    assert few.num_problems == len(list(world.generate(seed=1, num_problems=3, max_level=4))) == 3
    assert sum(map(len, few.left_out.values())) == 17
    assert set.union(*map(set, WORLD.published_halves())) == set(read_splits("telecom")["base"])


def test_tickets_do_not_tell_the_fault_and_prompts_share_all_but_the_ticket() -> None:
    prompts = {problem.requests[0] for problem in problems().values()}
    assert len(prompts) == 5
    assert len({prompt.partition("<ticket>")[0] for prompt in prompts}) == 1


def test_the_tools_are_the_packages_and_described() -> None:
    assert (len(NAMES["assistant"]), len(NAMES["user"]), len(all_tools())) == (13, 30, 44)
    grant = next(tool for tool in all_tools() if tool.name == "grant_app_permission")
    assert grant.parameters["required"] == ["app_name", "permission"]
    assert grant.parameters["properties"]["permission"]["description"].startswith("The permission to grant")
    text = "Do it.\n\nIn full.\n\nArgs:\n    one (str): The first.\n    two: The other.\n\nReturns:\n    Nothing.\n"
    assert read_docstring(text) == ("Do it.\n\nIn full.", {"one": "The first.", "two": "The other."})


def test_experts_look_before_they_act_and_succeed() -> None:
    for problem in random.Random(2).sample(list(problems().values()), 20):
        demonstration = experts.demonstrate(WORLD, problem, random.Random(3))
        assert demonstration is not None
        assert len(demonstration.assistant_texts) == len(experts.looks(problem)) + len(solution(problem)) + 1 <= 23
        assert "get_customer_by_phone" in demonstration.assistant_texts[0]


def test_a_row_with_a_category_of_its_own_is_demonstrated_by_its_reference() -> None:
    own = LOCKED.model_copy(update={"category": "mine"})
    demonstration = experts.demonstrate(WORLD, own, random.Random(3))
    assert demonstration is not None and len(demonstration.assistant_texts) == len(solution(own)) + 1


# The package


def test_stand_ins_are_there_for_the_import_alone() -> None:
    code = (
        "import sys; from tasks.environments.tau2 import package as p; p.tools_class('telecom', 'TelecomUserTools');"
        "print([name for name in sys.modules if name.startswith('inspect_ai')], p.load_module('utils').__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[0] == "[] inspect_evals.tau2.utils"


def test_where_inspect_ai_is_installed_nothing_stands_in_for_it(tmp_path: Any) -> None:
    """A tool's class then has a store that all instances share; the methods alone are taken, so episodes do not."""
    folder = tmp_path / "inspect_ai"
    folder.mkdir()
    (folder / "__init__.py").write_text("REAL = True\n")
    code = (
        "import sys; from tasks.environments.tau2 import package as p\n"
        "with p._stand_ins(p._folder()):\n"
        "    import inspect_ai; assert inspect_ai.REAL; assert 'inspect_evals.tau2' not in sys.modules\n"
        "print('inspect_ai' in sys.modules)"
    )
    path = {"PYTHONPATH": f"{tmp_path}:."}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=path)
    assert done.stdout == "True\n"
    assert not hasattr(tools_class("telecom", "TelecomAgentTools"), "model_fields")
    assert hasattr(load_module("telecom.TelecomAgentTools").TelecomAgentTools, "model_fields")


def test_a_domain_or_a_list_that_was_not_published_is_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match="telecom"):
        environment_settings("tau2", settings={"domain": "banking", "problems": "base"})
    with pytest.raises(ValueError, match=r"small is a list of telecom's.*airline.*base"):
        environment_settings("tau2", settings={"domain": "airline", "problems": "small"}, user=None)


def test_a_row_that_is_not_the_packages_is_refused_in_one_line() -> None:
    for world in ({}, {**ROAMING.world, "actions": [{"env_type": "user", "func_name": "__init__", "arguments": {}}]}):
        with pytest.raises(ValueError, match="cannot set it up"):
            WORLD.start(ROAMING.model_copy(update={"id": "mine", "world": world}))
