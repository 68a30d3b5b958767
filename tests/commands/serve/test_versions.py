"""Where an alias leads: by the journal, never in the middle of a promotion, and not where a hand moved it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.commands.serve.versions import Registered, open_source
from tasks.tracking.aliases import TRANSITION
from tests.tracking.candidates import MODEL, promote

pytestmark = pytest.mark.slow


def test_a_folder_has_its_own_name_from_wherever_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "agent" / "inner").mkdir(parents=True)
    (tmp_path / "agent" / "config.json").write_text("{}")
    (tmp_path / "linked").symlink_to(tmp_path / "agent")
    for place, name in ((".", "agent"), ("inner/..", "agent"), ("../linked", "linked")):
        monkeypatch.chdir(tmp_path / "agent")
        assert open_source(place, tmp_path, None).name == name


def test_where_nobody_is_champion_the_last_decision_is_named(project: Path):
    """As after a promotion that was refused."""
    page = project / "decision.html"
    for is_told in (False, True):
        with pytest.raises(ValueError, match="makes one") as caught:
            open_source(f"models:/{MODEL}@champion", project / "served", None, decision=page)
        told = str(caught.value)
        assert (str(page) in told, "`serve FOLDER`" in told, "\n" in told) == (is_told, is_told, False)
        page.write_text("<p>Refused.</p>")


def test_an_alias_is_followed_as_the_journal_has_it(project: Path):
    promote("a")
    promote("b")
    source = Registered(f"models:/{MODEL}@champion", project / "served")
    client, found = source.registry.client, source.now()
    assert found is not None and found.version == f"{MODEL}/2" and source.is_followed
    assert (found.fetch() / "model.safetensors").read_bytes() == b"b"

    client.set_registered_model_tag(MODEL, TRANSITION, "the aliases are being set")
    assert source.now() is None  # whoever is at it completes it
    again = source.now()  # nobody was: it had been killed
    assert again is not None and again.version == f"{MODEL}/2"
    assert TRANSITION not in source.registry.model_tags()

    client.set_model_version_tag(MODEL, "2", "folder_hash", "../elsewhere")  # as a number that begins again has
    other = source.now()
    assert other is not None and other.version == found.version and other.key != found.key
    assert other.folder.parent == found.folder.parent

    client.set_registered_model_alias(MODEL, "champion", "1")
    with pytest.raises(ValueError, match="registry restore"):
        source.now()
    fixed = Registered(f"models:/{MODEL}/1", project / "served")
    assert not fixed.is_followed and fixed.now() is not None
