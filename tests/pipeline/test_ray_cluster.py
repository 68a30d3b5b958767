"""Ray's launcher without Ray: what is asked, whether it fits, and what a person is told."""

from __future__ import annotations

import os
import socket
import stat
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tasks.core.settings import load
from tasks.models.settings import LaunchSettings, RaySettings
from tasks.pipeline import on_ray, ray_cluster
from tasks.pipeline.launch import place_of
from tasks.pipeline.on_ray import refuse_transfer, variables_for
from tasks.pipeline.order import CommonSections, check_machine
from tasks.pipeline.rank_host import News
from tasks.pipeline.ray_cluster import (
    LONGEST_BASE,
    Cluster,
    bundles_of,
    connected,
    fits,
    make_session_folder,
    reaches,
    told_bundles,
)
from tasks.pipeline.run_lock import FLOW_VARIABLE
from tests.engine_benches import vllm_settings
from tests.pipeline.test_launch import MEETING
from tests.profiles import profile_params


def launch(**changed: Any) -> LaunchSettings:
    params = profile_params("test")
    params["launch"] |= {"launcher": "ray", "num_trainers": 2, **changed}
    return load(CommonSections, params).launch


def test_a_trainer_asks_for_its_threads_and_a_server_for_its_gpus() -> None:
    """Two trainers of 4 threads, and a server of 2 GPUs."""
    on_gpus = bundles_of(2, 4, gpus=True, num_servers=1, per_server=2)
    assert on_gpus == [{"CPU": 4.0, "GPU": 1.0}, {"CPU": 4.0, "GPU": 1.0}, {"CPU": 1.0, "GPU": 2.0}]
    assert told_bundles(on_gpus, 2) == "2 trainers of 4 CPU + 1 GPU and 1 vLLM server of 1 CPU + 2 GPU"
    assert bundles_of(1, 2, gpus=False, num_servers=1, per_server=2) == [{"CPU": 2.0}, {"CPU": 1.0}]


def test_bundles_fit_nodes_only_whole() -> None:
    """3 GPUs in all are no room for 2 servers of 2, and the trainer must not take half of the pair."""
    trainer, server = {"CPU": 1.0, "GPU": 1.0}, {"CPU": 1.0, "GPU": 2.0}
    assert fits([trainer, server], [{"CPU": 8.0, "GPU": 2.0}, {"CPU": 8.0, "GPU": 1.0}])
    assert not fits([server, server], [{"CPU": 8.0, "GPU": 2.0}, {"CPU": 8.0, "GPU": 1.0}])
    assert not fits([trainer], [{"CPU": 8.0, "GPU": 0.0}])


def test_only_the_named_variables_and_the_flows_token_go_to_other_nodes() -> None:
    environment = {"AWS_PROFILE": "a", "AWSOME": "b", "HOME": "/root", "MY_KEY": "c", FLOW_VARIABLE: "d"}
    settings = launch(ray={"address": None, "place_seconds": 60.0, "variables": ["AWS_*", "MY_KEY"]})
    assert variables_for(settings, environment) == {"AWS_PROFILE": "a", "MY_KEY": "c", FLOW_VARIABLE: "d"}


def test_the_command_itself_is_no_rank_and_one_that_it_placed_is() -> None:
    assert place_of(launch(), MEETING) is None
    assert place_of(launch(), {**MEETING, "TORCHELASTIC_RUN_ID": "7"}) is not None


@pytest.mark.parametrize("address", ["ray://head:10001", "http://head:6379", "head"])
def test_an_address_that_is_none_of_a_head_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="address"):
        RaySettings(address=address, place_seconds=1.0, variables=[])


def test_weights_for_servers_on_other_nodes_go_by_a_folder(tmp_path: Any) -> None:
    settings = vllm_settings(tmp_path)
    refuse_transfer(settings.model_copy(update={"mode": "in_process", "transfer": "ipc"}))
    with pytest.raises(ValueError, match=r"transfer nccl.*Set engine.settings.transfer to disk"):
        refuse_transfer(settings.model_copy(update={"mode": "server", "transfer": "nccl"}))


def test_a_flow_without_ray_is_refused_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    params = profile_params("test")
    params["launch"] |= {"launcher": "ray", "num_trainers": 2}
    with pytest.raises(ValueError, match="Run `make setup-ray`"):
        check_machine(params)


def test_a_head_that_does_not_listen_is_not_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert reaches(address)
    assert not reaches(address)


@pytest.mark.parametrize(("length", "is_used"), [(LONGEST_BASE, True), (LONGEST_BASE + 1, False)])
def test_a_session_of_ray_has_a_short_folder(length: int, is_used: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the longest of its sockets has a path of at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="b", dir="/tmp") as parent:
        base = Path(parent) / ("d" * (length - len(parent) - 1))
        base.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(base))
        folder = make_session_folder()
        socket_of_ray = folder / "session_2026-01-01_00-00-00_000000_4194304" / "sockets" / "plasma_store"
        assert len(os.fsencode(socket_of_ray)) <= 107
        assert (folder.parent == base) == is_used
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        folder.rmdir()


@pytest.mark.slow
def test_a_port_of_something_else_is_one_line_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "CONNECT_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        settings = RaySettings(address=f"127.0.0.1:{server.getsockname()[1]}", place_seconds=60.0, variables=[])
        with pytest.raises(ValueError, match="no answer of Ray"), connected(settings, []):
            pass


def test_another_token_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ending = "import sys; sys.exit('rpc_client.cc: InvalidAuthToken: Authentication token is invalid')"
    monkeypatch.setattr(ray_cluster, "CONNECT", ending)
    with socket.create_server(("127.0.0.1", 0)) as server:
        settings = RaySettings(address=f"127.0.0.1:{server.getsockname()[1]}", place_seconds=60.0, variables=[])
        with pytest.raises(ValueError, match="its token is another"), connected(settings, []):
            pass


def test_hosts_are_renewed_while_ranks_are_placed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_ray, "RENEW_SECONDS", 0.01)
    placement = on_ray.Placement("train", Cluster("127.0.0.1:1", "names"), launch(), [], None)
    placement.servers = [Mock()]
    renew = placement.servers[0].renew.remote
    with placement.renewed():
        while renew.call_count < 3:
            time.sleep(0.01)


def test_a_character_in_two_pieces_is_shown_whole(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    for piece in ("█".encode()[:1], "█".encode()[1:]):
        on_ray._show(News(piece, b"", None))
    assert capfdbinary.readouterr().out == "█".encode()
