"""Models are loaded in one file, where each call says: these files alone, no pickle, no code of the model's author."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.contracts.import_graph import dotted, nodes, python_files

HOME = Path("tasks/models/folders.py")
ASKED = {"local_files_only": True, "trust_remote_code": False}
# PEFT has no code to run and no such arguments; that it finds safetensors, and all of them, `_load_merged` makes sure.
ASKED_OF = {"PeftModel": {"local_files_only": True}, "AutoModelForCausalLM": {**ASKED, "use_safetensors": True}}
UNPICKLES = {"torch.load", "pickle.load", "joblib.load", "numpy.load", "np.load"}  # of files, that is


def calls(file: Path) -> list[ast.Call]:
    return [node for node in nodes(file) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]


def loading_calls(file: Path) -> list[ast.Call]:
    return [
        call for call in calls(file) if isinstance(call.func, ast.Attribute) and call.func.attr == "from_pretrained"
    ]


def test_nothing_is_loaded_outside_the_one_file():
    assert len(loading_calls(HOME)) >= 4
    files = [file for file in python_files("flows", "tasks") if file != HOME]
    assert not [f"{file}:{call.lineno}" for file in files for call in loading_calls(file)]


@pytest.mark.parametrize("call", loading_calls(HOME), ids=lambda call: ast.unparse(call.func))
def test_each_call_says_what_may_be_read_and_that_no_code_is_run(call: ast.Call):
    assert isinstance(call.func, ast.Attribute)
    said = {word.arg: word.value.value for word in call.keywords if isinstance(word.value, ast.Constant)}
    asked = ASKED_OF.get(ast.unparse(call.func.value), ASKED)
    assert asked.items() <= said.items()


def test_no_file_is_ever_unpickled():
    files = python_files("flows", "tasks")
    assert not [f"{file}:{call.lineno}" for file in files for call in calls(file) if dotted(call.func) in UNPICKLES]
