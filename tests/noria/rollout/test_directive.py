from dataclasses import asdict, replace

import jwt
import pytest

from noria.contracts.errors import ConfigError, DirectiveRefused
from noria.contracts.rollout import Directive
from noria.rollout.directive import read, sign, target_of

KEY = "k" * 48
DIRECTIVE = Directive(
    model="dispatch.router.r00003",
    invariant="a" * 32,
    trace_id="b" * 32,
    round="dispatch.router.r00004",
    sample_id=7,
    group=1,
    member=2,
    seed=11,
    temperature=0.7,
)


def test_a_signed_directive_reads_back_as_it_was() -> None:
    assert read(sign(DIRECTIVE, KEY), KEY) == DIRECTIVE


def test_a_whole_number_is_a_temperature() -> None:
    directive = replace(DIRECTIVE, temperature=1)
    assert read(sign(directive, KEY), KEY).temperature == 1


def test_another_key_is_refused_and_the_message_names_the_mend() -> None:
    with pytest.raises(DirectiveRefused, match="NORIA_TRAINER_KEY"):
        read(sign(DIRECTIVE, "x" * 48), KEY)


def test_an_expired_directive_is_refused() -> None:
    with pytest.raises(DirectiveRefused, match="expired"):
        read(sign(DIRECTIVE, KEY, ttl_seconds=-5), KEY)


def test_a_directive_without_expiry_is_refused() -> None:
    with pytest.raises(DirectiveRefused, match="exp"):
        read(jwt.encode(asdict(DIRECTIVE), KEY, algorithm="HS256"), KEY)


def test_an_unsigned_token_is_refused() -> None:
    token = jwt.encode({**asdict(DIRECTIVE), "exp": 4_000_000_000}, None, algorithm="none")
    with pytest.raises(DirectiveRefused):
        read(token, KEY)


@pytest.mark.parametrize("text", ["", "not a token", "a.b.c", '{"model": "x"}'])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(DirectiveRefused, match="trainMeta"):
        read(text, KEY)


@pytest.mark.parametrize(("name", "value"), [("seed", "1"), ("seed", None), ("sample_id", True), ("model", 3)])
def test_a_claim_of_the_wrong_type_is_named(name: str, value: object) -> None:
    token = jwt.encode({**asdict(DIRECTIVE), name: value, "exp": 4_000_000_000}, KEY, algorithm="HS256")
    with pytest.raises(DirectiveRefused, match=name):
        read(token, KEY)


def test_a_short_key_cannot_sign() -> None:
    with pytest.raises(ConfigError, match="32"):
        sign(DIRECTIVE, "short")


def test_the_target_comes_from_the_model_or_else_from_the_round() -> None:
    assert str(target_of(DIRECTIVE)) == "dispatch.router"
    assert str(target_of(replace(DIRECTIVE, model="base"))) == "dispatch.router"
    with pytest.raises(DirectiveRefused, match="round key"):
        target_of(replace(DIRECTIVE, model="base", round="x"))
