"""The proofs with which an agent and the launcher show each other that they have the job's key.

Without them, a program that listens at one of the launcher's addresses could make an agent run anything, and
a program that connects to the launcher could take a rank's place. The key itself is not sent.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass


@dataclass(frozen=True)
class Call:
    """A caller's first message."""

    name: str
    """A host's name in the hostfile, or the number of a rank."""
    nonce: str


@dataclass(frozen=True)
class Answer:
    """The launcher's answer."""

    nonce: str
    proof: str


def new_nonce() -> str:
    """Returns a random text that has never been used."""
    return secrets.token_hex(16)


def answer_call(key: str, call: Call) -> Answer:
    """Returns the launcher's answer, which proves that it has the key."""
    nonce = new_nonce()
    return Answer(nonce, _proof(key, "launcher", call, nonce))


def proves_launcher(key: str, call: Call, answer: Answer) -> bool:
    """Whether an answer comes from the launcher."""
    return _equal(answer.proof, _proof(key, "launcher", call, answer.nonce))


def caller_proof(key: str, call: Call, answer: Answer) -> str:
    """Returns the caller's last message, which proves that it has the key."""
    return _proof(key, "caller", call, answer.nonce)


def proves_caller(proof: str, key: str, call: Call, answer: Answer) -> bool:
    """Whether this is the proof of a caller with the key."""
    return _equal(proof, caller_proof(key, call, answer))


def _proof(key: str, side: str, call: Call, nonce: str) -> str:
    text = "".join(f"{len(part)}:{part}" for part in (side, call.name, call.nonce, nonce))
    return hmac.new(key.encode(), text.encode(errors="replace"), "sha256").hexdigest()


def _equal(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode(errors="replace"), wanted.encode())
