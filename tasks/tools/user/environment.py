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
        self._check_requests_are_kept(problem)
        if self.speaker is not None:
            return PlayedUser(self.user_settings, self.speaker, problem, self._rules(problem), stream=stream)
        return script_user(self.inner, problem, self.user_settings, stream=stream)

    def shards(self, problem: Problem) -> Any:
        return shards_of(self.inner, problem)

    def _rules(self, problem: Problem) -> str:
        """What the model that plays the user reads: turnwise's form, or the environment's own guidelines."""
        assert self.user_settings.model is not None
        instructions = self.user_settings.model.instructions
        if instructions is not None:
            return rules_of(instructions, self.user_settings.reveal, problem, self.shards(problem))
        guidelines = self.inner.user_guidelines(problem)
        if not guidelines:
            raise ValueError(
                f"environment.user.model.instructions is null and {self.inner.name} has no guidelines of its own, so "
                f"the user of problem {problem.id!r} would not know whom to play. Write instructions."
            )
        return guidelines

    def _check_requests_are_kept(self, problem: Problem) -> None:
        """ValueError where each request is judged by itself and the user would make others."""
        tells_parts = self.user_settings.reveal != "at_once" and len(self.shards(problem)) > 1
        if (self.speaker is not None or tells_parts) and self.inner.judges_each_request(problem):
            raise ValueError(
                f"problem {problem.id!r}: each of its {len(problem.requests)} requests is judged by itself, and a "
                f"simulated user would word or part them anew, so answers would be judged against the wrong request. "
                f"Give it one request, or set environment.user to null."
            )

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
