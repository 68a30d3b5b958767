"""The browser's data: every episode is in it, whatever it holds; nothing in it can run; words lead back to episodes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tasks.chat.formats.base import CallFormat
from tasks.chat.formats.catalog import FORMATS
from tasks.chat.formats.recipe import RECIPE
from tasks.core.files import write_json, write_jsonl
from tasks.core.records import ToolCall, Turn
from tasks.core.settings import Paths
from tasks.report.browser import PAGE, Policy, build_browser, write_browser
from tasks.report.episodes import HEAD_CHARACTERS, TAIL_CHARACTERS, TOOL_CALL, shorten, shown_episode, texts_of
from tasks.report.script_files import CHUNK_CHARACTERS, ChunkWriter, ScriptFolder, address_of, script_json
from tasks.report.token_heat import MOST, Numbers, TokenReader, load_tokenizer
from tasks.report.word_index import WordIndex
from tasks.rewards.stored import Rescorer
from tests.measurement.hostile import CLOSING, HUGE, SCRIPT
from tests.measurement.small_world import REQUESTS, TYPES, small_episode, small_policies, write_tokenizer
from tests.rewards.shaped import shaped


def received(file: Path) -> Any:
    """What a data script hands to the page."""
    text = file.read_text(encoding="utf-8")
    name, digest, value = text.removeprefix("turnwise.receive(").split(",", 2)
    assert json.loads(name) == file.stem and len(json.loads(digest)) == 12 and value.endswith(");\n")
    return json.loads(value.removesuffix(");\n"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browser")
    return build_browser(folder / "report", small_policies(folder), title="small").parent / "data"


def test_a_browser_is_one_folder_with_the_page_and_its_data(data: Path):
    assert {file.name for file in data.parent.iterdir()} == {
        *("trajectories.html", "style.css", "browser.css", "data"),
        *(f"{name}.js" for name in ("data", "dom", "state", "search", "filters", "list", "heat", "turns")),
        *(f"{name}.js" for name in ("differences", "problem", "keys", "main")),
    }
    page = (data.parent / "trajectories.html").read_text(encoding="utf-8")
    for file in data.parent.glob("*.*"):
        assert file.name == "trajectories.html" or f'="{address_of(file)}"' in page


def test_every_file_of_the_page_is_read_at_a_sitting():
    assert all(len(file.read_text(encoding="utf-8").splitlines()) <= 250 for file in PAGE.iterdir())


def test_the_index_has_a_row_an_episode_and_the_first_two_policies_are_compared_first(data: Path):
    index = received(data / "index.js")
    assert [(policy["name"], policy["first"]) for policy in index["policies"]] == [
        ("base", 0), ("best", 8), ("warm_start", 16), ("champion", 24), ("frontier", 32),
    ]  # fmt: skip
    assert {len(column) for column in index["episodes"].values()} == {4 * 8 + 4}
    assert index["problems"][1] == ["p-worse", 1, "What does Lima to Łódź cost?"]
    worse = 8 + 2  # best, after two samples of p-better
    of_worse = {name: column[worse] for name, column in index["episodes"].items()}
    assert index["outcomes"][of_worse["outcome"]] == "max_turns"
    assert index["limits"][of_worse["limit"]] == "max_turns"
    assert [index["errors"][number] for number in index["sets"][of_worse["errors"]]] == ["timeout"]
    assert {index["tools"][number] for number in index["sets"][of_worse["tools"]]} == {"find_city", "get_cost"}
    assert index["episodes"]["num_sampled_tokens"][-1] is None  # the frontier shows no tokens


def test_the_index_has_the_digest_of_every_other_script_and_of_nothing_else(data: Path, tmp_path: Path):
    def digests(folder: Path) -> dict[str, str]:
        texts = {file.stem: file.read_text(encoding="utf-8") for file in folder.glob("*.js")}
        return {name: json.loads(text.split(",", 2)[1]) for name, text in texts.items() if name != "index"}

    assert received(data / "index.js")["digests"] == digests(data)
    policies = small_policies(tmp_path)
    again = build_browser(tmp_path / "again", policies, title="another title").parent / "data"
    assert digests(again) == digests(data)  # no time, no path
    write_jsonl(policies[0].trajectories, [small_episode("base", "p-same", 0, False).to_row()])
    other = build_browser(tmp_path / "other", policies, title="small").parent / "data"
    assert digests(other)["episodes-0000"] != digests(data)["episodes-0000"]


def test_an_episode_is_told_turn_by_turn_with_where_it_stands_in_its_file(data: Path):
    (episodes,) = [received(file) for file in data.glob("episodes-*.js")]
    shown = episodes[8 + 2]
    assert (shown["line"], shown["outcome"], shown["checks"]) == (3, "max_turns", [["state", False]])
    assert shown["parts"] == [["outcome", 0.0], ["format", 1.0], ["call_validity", 1.0]]
    assert shown["turns"][1]["calls"] == [
        {
            "name": "get_cost",
            "malformed": False,
            "arguments": [["to", '"Rome"']],
            "reply": "no answer in 3 s",
            "error": "timeout",
        }
    ]
    assert [turn["num_tokens"] for turn in shown["turns"]] == [2, 2]
    assert json.loads(shown["details"]) == {"differs": ["booking"]}


def test_changes_are_counted_by_problem_over_the_samples_both_met(tmp_path: Path):
    policies = small_policies(tmp_path)
    assert write_browser(tmp_path / "ab", policies, title="") == {
        "improved": 1, "regressed": 1, "same": 2, "failing": 2,
    }  # fmt: skip
    by_frontier = write_browser(tmp_path / "bf", [policies[1], policies[4]], title="")
    assert by_frontier == {"improved": 1, "regressed": 0, "same": 3, "failing": 0}  # sample 0 alone: p-mixed is equal


def test_an_episode_that_the_environment_lost_changes_nothing_and_fails_nothing(tmp_path: Path):
    """As in the statistics: equal policies, of which one lost episodes, are equal."""
    policies = small_policies(tmp_path)[:2]
    for policy in policies:
        episodes = [small_episode(policy.name, problem, 0, True) for problem in TYPES]
        if policy.name == "best":
            episodes[0].outcome = episodes[1].outcome = "environment_error"
        write_jsonl(policy.trajectories, [episode.to_row() for episode in episodes])
    assert write_browser(tmp_path / "ab", policies, title="") == {
        "improved": 0, "regressed": 0, "same": 2, "failing": 0,
    }  # fmt: skip


def test_a_frontier_whose_endpoint_counted_no_tokens_is_shown_without_a_reward(tmp_path: Path):
    """`token_cost` cannot be computed of it, which is no reason to have no page."""
    policies, paths = small_policies(tmp_path), Paths(tmp_path)
    played = [small_episode("frontier", problem, 0, True) for problem in TYPES]
    for episode in played:
        episode.details = {"usage": {"output_tokens": None}}
    write_jsonl(policies[4].trajectories, (episode.to_row() for episode in played))
    common: dict[str, Any] = {"level": 1, "world": {}, "reference": [{"calls": [], "answer": "x"}], "split_group": "g"}
    rows = [{"id": name, "category": TYPES[name], "requests": [REQUESTS[name]], **common} for name in TYPES]
    write_jsonl(paths.split("test"), rows)
    rescorer = Rescorer(paths, shaped(token_cost=0.5), ("test",))
    write_browser(tmp_path / "report", policies, title="", rescorer=rescorer)
    (episodes,) = [received(file) for file in (tmp_path / "report" / "data").glob("episodes-*.js")]
    assert [episode["reward"] for episode in episodes[-4:]] == [None] * 4
    assert episodes[0]["reward"] == -0.002  # base fails p-better with four tokens


def test_words_find_episodes_by_whole_name_part_and_character(data: Path):
    def episodes_of(word: str) -> list[int]:
        key = {"ł": "u0142", "東": "u6700", "京": "u4e00"}.get(word[0], word[0])
        chunk = received(data / f"words-{key}.js")
        steps = chunk["episodes"][chunk["words"].index(word)]
        return [sum(steps[: i + 1]) for i in range(len(steps))]

    assert episodes_of("get_cost") == [10, 11]  # of best, on p-worse
    assert episodes_of("book_flight") == episodes_of("flight") == [n for n in range(36) if n not in (10, 11)]
    assert episodes_of("łódź") == [2, 3, 10, 11, 18, 19, 26, 27, 33]
    assert episodes_of("東") == episodes_of("京") == [4, 5, 12, 13, 20, 21, 28, 29, 34]
    assert episodes_of("timeout") == [10, 11]
    assert all(received(file)["words"] == sorted(received(file)["words"]) for file in data.glob("words-*.js"))


def test_words_of_every_script_are_spread_over_files(tmp_path: Path):
    index = WordIndex()
    index.add(0, ["билет билеты рейс _private naïve 東京 서울 สวัสดี 𝒳"])
    keys = ["n", "u005f", "u0431", "u0440", "u0e27", "u0e2a", "u4e00", "u6700", "uc100", "uc600", "u1d400"]
    assert set(index.write(ScriptFolder(tmp_path))) >= set(keys)
    assert received(tmp_path / "words-u0431.js")["words"] == ["билет", "билеты"]


def words_of(turn: Turn, folder: Path) -> set[str]:
    """The words that find an episode of this turn."""
    episode, index = small_episode("base", "p-same", 0, True), WordIndex()
    episode.turns = [turn]
    index.add(0, texts_of(episode))
    return {word for key in index.write(ScriptFolder(folder)) for word in received(folder / f"words-{key}.js")["words"]}


@pytest.mark.parametrize("num_levels", [0, 1])
def test_words_of_json_are_those_that_its_strings_say(tmp_path: Path, num_levels: int):
    """As `json.dumps` and most models write it: the letter of an escape is no part of a word."""
    arguments = {"body": "Dear Ann,\nrefund granted\n\tsignature", "city": "Łódź", "path": "C:\\new", "sign": "𝒳"}
    call, reply = {"name": "send_mail", "arguments": arguments}, json.dumps({"text": "one\nfailure", "to": "Kraków"})
    for _ in range(num_levels):
        reply = json.dumps({"content": reply})
    written = f"I write. <tool_call>{json.dumps(call)}</tool_call>"
    words = words_of(Turn(text=written, calls=[call], replies=[reply], errors=[None]), tmp_path)
    assert words >= {"dear", "refund", "granted", "signature", "łódź", "new", "𝒳", "send_mail", "write", "tool_call"}
    assert words >= {"one", "failure", "kraków"}
    assert not words & {"nrefund", "tsignature", "u0141", "0141"} and (num_levels or "nfailure" not in words)


def test_words_beside_a_backslash_that_is_none_of_json_are_found(tmp_path: Path):
    reply, mail = r"saved C:\new\table", {"name": "save", "arguments": {"path": r"D:\fonts"}}
    assert words_of(Turn(text="", calls=[{}], replies=[reply]), tmp_path / "a") >= {"new", "table"}
    assert words_of(Turn(text=r"<function=save>D:\fonts", calls=[mail]), tmp_path / "b") >= {"save", "fonts"}
    assert words_of(Turn(text=r"<tool_call>{C:\new", calls=[{"malformed": True}]), tmp_path / "c") >= {"new"}


@pytest.mark.parametrize("hidden", ["\u115f", "\u1160", "\u3164", "\uffa0", "\xad"])
def test_what_no_screen_shows_ends_a_word_and_leaves_the_others_in_order(tmp_path: Path, hidden: str):
    index = WordIndex()
    index.add(0, [f"name: {hidden} vi{hidden}", "việt viết ｱｲｳ ｶﾅ ᄀ"])
    for key in index.write(ScriptFolder(tmp_path)):
        words = received(tmp_path / f"words-{key}.js")["words"]
        assert words == sorted(words)
    assert received(tmp_path / "words-v.js")["words"] == ["vi", "viết", "việt"]  # by code point


def test_a_word_of_a_megabyte_takes_forty_characters_of_the_index(tmp_path: Path):
    index = WordIndex()
    index.add(0, [HUGE])
    assert index.write(ScriptFolder(tmp_path)) == ["x"]
    assert received(tmp_path / "words-x.js") == {"words": ["x" * 40], "episodes": [[0]]}


def test_tokens_have_their_text_and_log_prob_in_hundredths(data: Path):
    texts = received(data / "token-texts.js")
    (tokens,) = [received(file) for file in data.glob("tokens-*.js")]
    first_turn, second_turn = tokens[0][:2]
    assert [texts[number] for number in first_turn[0]] == ["find_city", "Oslo"]
    assert first_turn[1] == [0, 200]
    assert [texts[number] for number in second_turn[0]] == ["book_flight", "economy"]
    assert tokens[-1] is None  # the frontier


def test_a_tokenizer_that_did_not_make_these_tokens_is_not_believed(tmp_path: Path):
    episode = small_episode("base", "p-same", 0, True)
    texts = Numbers()
    TokenReader(write_tokenizer(tmp_path), texts).turns(episode)
    assert texts.values[:2] == ["find_city", "Oslo"]
    episode.turns[0].text = "something else"
    texts = Numbers()
    TokenReader(tmp_path, texts).turns(episode)
    assert texts.values[:2] == ["#1", "#4"]


def test_a_pointer_is_followed_and_a_missing_or_broken_tokenizer_gives_ids(tmp_path: Path):
    write_tokenizer(tmp_path / "model")
    write_json(tmp_path / "pointed" / "pointer.json", {"path": str(tmp_path / "model"), "folder_hash": "0"})
    assert load_tokenizer(tmp_path / "pointed") is not None
    assert load_tokenizer(tmp_path / "nowhere") is None
    (tmp_path / "model" / "tokenizer.json").write_text("{}", encoding="utf-8")
    assert load_tokenizer(tmp_path / "model") is None


def test_a_log_prob_that_is_no_number_is_the_most_unlikely(tmp_path: Path):
    episode = small_episode("base", "p-same", 0, True)
    episode.sequences[0].sampler_logp[1:3] = [float("nan"), float("-inf")]
    turns = TokenReader(None, Numbers()).turns(episode)
    assert turns is not None and turns[0][1] == [MOST, MOST]


def test_nothing_in_a_script_ends_it_or_opens_markup():
    text = script_json([SCRIPT, CLOSING, "<!-- ]]> \u2028\u2029", {"a": "&"}])
    assert not set("<>\u2028\u2029") & set(text)
    assert json.loads(text) == [SCRIPT, CLOSING, "<!-- ]]> \u2028\u2029", {"a": "&"}]


def test_marks_that_reorder_or_hide_text_are_spelled_out_wherever_they_stand():
    value = json.loads(script_json([["card\u202e8\u202c"], {"ours": "half \ud83d. nul \x00 esc \x1b[31m \x85"}]))
    assert value == [
        ["card⟨U+202E⟩8⟨U+202C⟩"],
        {"ours": "half \N{REPLACEMENT CHARACTER}. nul ⟨U+0000⟩ esc ⟨U+001B⟩[31m ⟨U+0085⟩"},
    ]
    undecodable = b"Caf\xe9".decode("utf-8", "surrogateescape")  # what a tool's bytes become that are no UTF-8
    assert json.loads(script_json(undecodable)) == "Caf\N{REPLACEMENT CHARACTER}"
    assert json.loads(script_json("مرحبا")) == "مرحبا"  # writing that runs from right to left is no trick
    assert json.loads(script_json("C:\\u0041 \\b")) == "C:\\u0041 \\b"  # a backslash is only looked at twice


def test_a_long_text_keeps_both_ends_and_says_what_is_missing():
    most = HEAD_CHARACTERS + TAIL_CHARACTERS
    assert shorten("x" * most) == "x" * most
    short = shorten("a" * HEAD_CHARACTERS + "?" * 990_000 + "z" * TAIL_CHARACTERS)
    assert "?" not in short and short.startswith("aa") and short.endswith("zz")
    assert "… 990,000 more characters are in the trajectory file …" in short


def test_a_turn_of_calls_shows_its_words_apart_and_what_was_written_whole():
    episode = small_episode("base", "p-same", 0, True)
    text = 'First: <tool_call>{"name": "a"}</tool_call> then.'
    episode.turns = [
        Turn(
            text=text, calls=[{"malformed": True}], replies=["?"], errors=["invalid"], stop_reason="max_tokens_per_turn"
        )
    ]
    (turn,) = shown_episode(episode, line=1)["turns"]
    assert (turn["prose"], turn["raw"]) == ("First:  then.", text)
    assert turn["calls"] == [
        {"name": "malformed call", "malformed": True, "arguments": [], "reply": "?", "error": "invalid"}
    ]
    assert (turn["num_tokens"], turn["stopped_by"]) == (None, "max_tokens_per_turn")


@pytest.mark.parametrize("call_format", [*FORMATS, RECIPE], ids=lambda item: item.name)
def test_the_prose_of_a_turn_is_without_its_calls_in_every_format(call_format: CallFormat):
    text = call_format.text([ToolCall(name="look_up", arguments={"city": "Zürich"})])
    assert TOOL_CALL.sub("", text) == ""
    if not text.startswith(("{", "[look_up")):  # those are calls as whole messages alone
        assert TOOL_CALL.sub("", f"I look. {text}").strip() == "I look."
    assert TOOL_CALL.sub("", "[1] says so.") == "[1] says so."


def test_an_episode_lost_to_a_fault_has_no_reward_parts():
    episode = small_episode("base", "p-same", 0, True)
    episode.outcome, episode.fault = "environment_error", "the server went away"
    shown = shown_episode(episode, line=1)
    assert (shown["parts"], shown["fault"]) == ([], "the server went away")


def test_chunks_close_by_size_and_say_where_they_start(tmp_path: Path):
    writer = ChunkWriter(ScriptFolder(tmp_path), "episodes")
    for size in (CHUNK_CHARACTERS, 10, 10, CHUNK_CHARACTERS, 10):
        writer.add("y" * size)
    writer.close()
    assert writer.starts == [0, 1, 4]
    assert [len(received(tmp_path / f"episodes-000{i}.js")) for i in range(3)] == [1, 3, 1]


def test_policies_that_share_no_problem_and_files_that_hold_no_trajectories_are_refused(tmp_path: Path):
    policies = small_policies(tmp_path)
    other, empty, broken = (Policy(name, name, tmp_path / f"{name}.jsonl") for name in ("other", "empty", "broken"))
    episode = small_episode("base", "p-same", 0, True)
    episode.problem_id = "p-other"
    write_jsonl(other.trajectories, [episode.to_row()])
    write_jsonl(empty.trajectories, [])
    write_jsonl(broken.trajectories, [{"problem_id": "p"}])
    for policy, message in [
        (other, r"share no problem.*Run `python -m tasks evaluate` again"),
        (empty, "contains no trajectory"),
        (broken, "broken.jsonl, line 1: is not a trajectory"),
    ]:
        with pytest.raises(ValueError, match=message):
            build_browser(tmp_path / "report", [policies[0], policy], title="")
    assert not (tmp_path / "report").exists()


def test_two_episodes_in_one_place_are_refused(tmp_path: Path):
    policies = small_policies(tmp_path)
    row = small_episode("base", "p-same", 0, True).to_row()
    write_jsonl(policies[0].trajectories, [row, row])
    with pytest.raises(ValueError, match=r"base.jsonl, line 2: a second episode of problem 'p-same', sample 0"):
        build_browser(tmp_path / "report", policies, title="")
