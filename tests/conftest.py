"""What all tests share: nothing they start writes outside the folder, and the same examples are drawn every time."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import configuration, settings

from tasks.pipeline.order import SPIN_COUNT, SPIN_VARIABLE
from tests.parallel import FileScheduling, group_of, longest_first

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import Scheduling

    from tests.engine_benches import VLLMBench, VLLMServerBench

# A finished run, made up or of a whole flow, and an MLflow database; Postgres, S3, MLflow and Prefect, for every test
# that needs a server; two ranks that train.
pytest_plugins = [
    "tests.measurement.fixtures",
    "tests.pipeline.fixtures",
    "tests.ranks",
    "tests.services.fixtures",
    "tests.tracking.fixtures",
]
ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache"
RESULTS = ROOT / "artifacts"
FIGURES = RESULTS / "bench"  # of benchmarks, which write them where the demo's results are
CHANGES = {"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "shutil.rmtree"}
# Where an event tells the open folder that its path is relative to.
FOLDER_ARGUMENT = {"os.mkdir": 2, "os.remove": 1, "os.rename": 2, "os.rmdir": 1}

HELD = ExitStack()  # what tests of one group share, until the last of them

WHOLE_FILE = re.compile(r"^pytestmark = (\[[^\]]*\]|.*)", re.MULTILINE)
MARK = re.compile(r"pytest\.mark\.(\w+)")

# The tests start thousands of Python processes. Where none may keep what it compiled, each compiles the project anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Read by the libraries when they are first imported, which is after this file.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HOME", str(CACHE / "huggingface"))
os.environ.setdefault("MPLCONFIGDIR", str(CACHE / "matplotlib"))
os.environ.setdefault("VLLM_CACHE_ROOT", str(CACHE / "vllm"))
os.environ.setdefault("VLLM_CONFIG_ROOT", str(CACHE / "vllm"))
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault(SPIN_VARIABLE, SPIN_COUNT)

# A shell that runs the tests in its background has them ignore Ctrl-C, and `nohup` a terminal that is closed, and every
# program they start with them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# What tests import and share lives to their end. To look through all of it for cycles took an eighth of their time, and
# more the longer a worker lived: nothing is looked for while tests are read, and what there is after a file is looked
# through once and then left out.
gc.disable()

configuration.set_hypothesis_home_dir(CACHE / "hypothesis")
settings.register_profile("turnwise", derandomize=True, database=None, deadline=None)
settings.register_profile("quick", settings.get_profile("turnwise"), max_examples=25)
settings.load_profile("turnwise")


def keep_results(event: str, arguments: tuple[object, ...]) -> None:
    """Refuse what would change the results of the checkout that is tested: a user's champion may be among them."""
    if event not in CHANGES:
        return
    if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
        return
    if event in FOLDER_ARGUMENT and arguments[FOLDER_ARGUMENT[event]] != -1:
        return  # below a folder that is open: shutil.rmtree, which has told its own path
    for path in arguments[:2] if event == "os.rename" else arguments[:1]:
        if isinstance(path, str | os.PathLike) and _is_a_result(Path(os.path.abspath(path)), event):
            raise RuntimeError(f"{event} of {path} in {Path.cwd()}: a test would change the results of this checkout")


def _is_a_result(path: Path, event: str) -> bool:
    """Of a run: neither the folder of results itself, where it is made, nor the figures of benchmarks."""
    if path == RESULTS and event == "os.mkdir":
        return False
    return path.is_relative_to(RESULTS) and not path.is_relative_to(FIGURES)


sys.addaudithook(keep_results)


def pytest_configure(config: pytest.Config) -> None:
    """`make check` draws the first 25 of the 100 examples that `make test` draws, where a test names no number."""
    if "not slow" in config.option.markexpr:
        settings.load_profile("quick")


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer | None) -> Scheduling:
    return FileScheduling(config, log)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip a file that `-m` leaves out: marked as a whole by what is not wanted, or nowhere by what is. It need not be
    imported (seconds) to say so. A file that is named on the command line is always read.
    """
    named = {name.split("::")[0] for name in config.args}
    if collection_path.suffix != ".py" or any(str(collection_path).endswith(name) for name in named):
        return None
    source = collection_path.read_text(encoding="utf-8")
    left_out = set(re.findall(r"not (\w+)", config.option.markexpr))
    wanted = set(re.findall(r"\w+", config.option.markexpr)) - left_out - {"not", "and", "or"}
    whole = WHOLE_FILE.search(source)
    is_unwanted = wanted and wanted.isdisjoint(MARK.findall(source))
    return True if is_unwanted or (whole and left_out.intersection(MARK.findall(whole[1]))) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=longest_first)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    gc.enable()


def _leave_out_what_stays() -> None:
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """After the last test of a group, end what its tests shared: two engines of vLLM hold 5 GB."""
    try:
        return (yield)
    finally:
        if nextitem is None or group_of(nextitem) != group_of(item):
            HELD.close()
            _leave_out_what_stays()


@pytest.fixture(scope="session")
def vllm_in_process(tmp_path_factory: pytest.TempPathFactory) -> VLLMBench:
    """One vLLM for all tests that need it: it takes half a minute to start."""
    from tests.engine_benches import VLLMBench

    return HELD.enter_context(closing(VLLMBench(tmp_path_factory.mktemp("vllm"))))


@pytest.fixture(scope="session")
def vllm_server(tmp_path_factory: pytest.TempPathFactory) -> VLLMServerBench:
    """The same behind a server of ours."""
    from tests.engine_benches import VLLMServerBench

    return HELD.enter_context(closing(VLLMServerBench(tmp_path_factory.mktemp("vllm_server"), num_servers=1)))


@pytest.fixture(scope="session")
def vllm_servers(tmp_path_factory: pytest.TempPathFactory) -> VLLMServerBench:
    """And behind two, for the drills."""
    from tests.engine_benches import VLLMServerBench

    return HELD.enter_context(closing(VLLMServerBench(tmp_path_factory.mktemp("vllm_servers"), num_servers=2)))
