"""An environment whose episodes have a simulated user; the outermost wrapper."""

from __future__ import annotations

from typing import Any

from tasks.core.files import json_hash
from tasks.core.records import Problem
from tasks.tools.base import REPLAY, Environment, ToldRequests, User
from tasks.tools.user.hidden import shards_of
from tasks.tools.user.played import PlayedUser, Speaker, rules_of
from tasks.tools.user.settings import UserModelSettings, UserSettings
from tasks.tools.wrappers import EnvironmentWrapper


class UserEnvironment(EnvironmentWrapper):
    """`describe` includes the user: an agent that meets another user plays in another environment."""

    def __init__(self, inner: Environment, settings: UserSettings):
        super().__init__(inner)
        self.user_settings = settings
        self.speaker = None if settings.model is None else open_speaker(settings.model)

    def start_user(self, problem: Problem, *, stream: str = "") -> User:
        check_user(self.inner, self.user_settings, problem)
        if self.speaker is not None:
            rules = rules_for_user(self.inner, self.user_settings, problem)
            return PlayedUser(self.user_settings, self.speaker, problem, rules, stream=stream)
        return script_user(self.inner, problem, self.user_settings, stream=stream)

    def check_user(self, problem: Problem) -> None:
        check_user(self.inner, self.user_settings, problem)

    def shards(self, problem: Problem) -> Any:
        return shards_of(self.inner, problem)

    def describe(self) -> dict[str, Any]:
        return {**self.inner.describe(), "user": describe_user(self.user_settings)}

    def fingerprint(self) -> str:
        return json_hash(self.describe())

    def close(self) -> None:
        if self.speaker is not None:
            self.speaker.close()
        self.inner.close()


class ReplayedUser(EnvironmentWrapper):
    """The same environment whose user draws anew: replay 0 is the first play."""

    def __init__(self, inner: Environment, replay: int):
        super().__init__(inner)
        self.replay = replay

    def start_user(self, problem: Problem, *, stream: str = "") -> User:
        return self.inner.start_user(problem, stream=f"{stream}{REPLAY}{self.replay}" if self.replay else stream)


def describe_user(settings: UserSettings | None) -> dict[str, Any] | None:
    """What the user's words depend on, as JSON; of a model in this process also the hash of its folder."""
    if settings is None:
        return None
    described = settings.model_dump(mode="json")
    if settings.model is not None and settings.model.url is None:
        from tasks.tools.user.frozen import hash_user

        described["model"]["weights"] = hash_user(settings.model)
    return described


def check_user(environment: Environment, settings: UserSettings | None, problem: Problem) -> None:
    """ValueError where no user of these settings could play the problem in this environment; no model is asked."""
    if settings is None:
        return
    _check_requests_are_kept(environment, settings, problem)
    if settings.model is not None:
        rules_for_user(environment, settings, problem)


def rules_for_user(environment: Environment, settings: UserSettings, problem: Problem) -> str:
    """What the model that plays the user reads: turnwise's form, or the environment's own guidelines."""
    assert settings.model is not None
    instructions = settings.model.instructions
    if instructions is not None:
        return rules_of(instructions, settings.reveal, problem, shards_of(environment, problem))
    guidelines = environment.user_guidelines(problem)
    if not guidelines:
        raise ValueError(
            f"environment.user.model.instructions is null and {environment.name} has no guidelines of its own, so the "
            f"user of problem {problem.id!r} would not know whom to play. Write instructions."
        )
    return guidelines


def _check_requests_are_kept(environment: Environment, settings: UserSettings, problem: Problem) -> None:
    """ValueError where each request is judged by itself and the user would make others."""
    tells_parts = settings.reveal != "at_once" and len(shards_of(environment, problem)) > 1
    if (settings.model is not None or tells_parts) and environment.judges_each_request(problem):
        raise ValueError(
            f"problem {problem.id!r}: each of its {len(problem.requests)} requests is judged by itself, and a "
            f"simulated user would word or part them anew, so answers would be judged against the wrong request. "
            f"Give it one request, or set environment.user to null."
        )


def script_user(environment: Environment, problem: Problem, settings: UserSettings, *, stream: str) -> User:
    """The environment's own user where the problem has no parts, or all are told at once."""
    shards = shards_of(environment, problem)
    if settings.reveal == "at_once" or len(shards) < 2:
        return environment.start_user(problem, stream=stream)
    return ToldRequests(shards, on_request=settings.reveal == "on_request")


def open_speaker(model: UserModelSettings) -> Speaker:
    """The model that plays users: behind an endpoint, or in this process."""
    if model.url is not None:
        from tasks.tools.user.endpoint import EndpointSpeaker

        return EndpointSpeaker(model)
    from tasks.tools.user.frozen import FrozenSpeaker

    return FrozenSpeaker(model)
