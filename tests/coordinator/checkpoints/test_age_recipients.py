import base64
import random
import struct

import pyrage
import pytest

from spmd_tx.coordinator.checkpoints import age_recipients
from spmd_tx.errors import ForeignCodeFailed, InvalidRequest
from spmd_tx.processes.child import Allowance, call_outside
from tests.support.foreign_code import end_of_each

AGE = "age1mys35czusr42qqecxk48td8g5t2qymqksgqqj5saulssz0p4kqkqul8c5c"
SSH = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHL2I6h1KrWs4lZ8qGr9D3gFTbD6I18IJ8qPa/3ItZ9C alice@example.org"
PANICS = "ssh-rsa AAAAB3NzaC1yc2EAAAAAAAAAAQA="  # an RSA key without an exponent
SECONDS = 60.0


def ssh(kind: str, *fields: bytes) -> str:
    content = b"".join(struct.pack(">I", len(field)) + field for field in (kind.encode(), *fields))
    return f"{kind} {base64.b64encode(content).decode()}"


def number(value: int) -> bytes:
    return value.to_bytes(value.bit_length() // 8 + 1, "big") if value else b""


def modulus(chance: random.Random, bits: int) -> int:
    return chance.getrandbits(bits) | 1 << (bits - 1) | 1


def odd_keys(count: int) -> list[str]:
    """Keys as somebody might make them by hand: nearly right, cut off, out of range, or nonsense."""
    chance = random.Random(0)
    fields = [
        b"",
        b"\0",
        b"\1",
        number(3),
        number(65537),
        number(2**32),
        number(2**33 - 1),
        bytes(32),
        bytes(31),
    ]
    fields += [number(modulus(chance, bits)) for bits in (8, 64, 512, 1024, 2048, 4096, 8192)]
    fields += [number(modulus(chance, 2048) - 1), b"\xff" * 256, b"\0" + number(65537), chance.randbytes(32)]
    age = str(pyrage.x25519.Identity.generate().to_public())
    keys = [PANICS, SSH, age]
    while len(keys) < count:
        match chance.randrange(4):
            case 0:
                kind = chance.choice(["ssh-rsa", "ssh-rsa", "ssh-ed25519", "ssh-dss", ""])
                keys.append(ssh(kind, *chance.choices(fields, k=chance.choice([0, 1, 2, 2, 2, 2, 3]))))
            case 1:
                kind, encoded = ssh("ssh-rsa", *chance.choices(fields, k=2)).split()
                keys.append(f"{kind} {encoded[: chance.randrange(len(encoded))]}")
            case 2:
                place = chance.randrange(len(age))
                keys.append(age[:place] + chance.choice("q1lAé\0 ") + age[place + chance.randrange(3) :])
            case 3:
                keys.append(ssh("ssh-ed25519", chance.randbytes(32)))
    return keys


def passes(text: str) -> bool:
    try:
        age_recipients.check_recipients([text])
    except InvalidRequest:
        return False
    return True


def test_the_library_panics_on_a_key_without_an_exponent():
    """Else there would be no need for any of this."""
    assert end_of_each([PANICS]) == ["PanicException"]


async def test_of_a_thousand_odd_keys_none_does_any_harm():
    keys = odd_keys(1000)
    taken = [key for key in keys if passes(key)]
    assert SSH in taken
    assert 100 < len(taken) < 900
    ends = await call_outside(
        "tests.support.foreign_code:end_of_each", {"recipients": taken}, Allowance(SECONDS)
    )
    assert set(ends) <= {"taken", "InvalidRequest"}


@pytest.mark.parametrize("text", [AGE, SSH])
def test_keys_are_taken_without_their_comments(text):
    (taken,) = age_recipients.check_recipients([f" {text}\n"])
    assert text.startswith(taken)


def test_keys_of_rsa_are_taken():
    key = ssh("ssh-rsa", number(65537), number(modulus(random.Random(1), 3072)))
    assert age_recipients.check_recipients([key]) == [key]


@pytest.mark.parametrize(
    "text, problem",
    [
        ("age1nonsense", "Bech32 does not know"),
        ("age1" + "q" * 57, "61 characters instead of 62"),
        ("age1" + "q" * 58, "checksum"),
        ("", "begins neither"),
        ("x" * 5000, "begins neither"),
        ("ssh-rsa AAAA", "does not hold a key"),
        ("ssh-rsa !", "Base64"),
        (PANICS, "exponent"),
        (ssh("ssh-rsa", b"", number(2**2047 + 1)), "exponent is not positive"),
        (ssh("ssh-rsa", number(2), number(2**2047 + 1)), "exponent is not an odd"),
        (ssh("ssh-rsa", number(2**40 + 1), number(2**2047 + 1)), "exponent is not an odd"),
        (ssh("ssh-rsa", number(3), number(2**2047)), "modulus is even"),
        (ssh("ssh-rsa", number(3), number(2**1023 + 1)), "has 1024 bits"),
        (ssh("ssh-rsa", number(3), number(2**20000 + 1)), "has 20001 bits"),
        (ssh("ssh-rsa", number(3), b"\x80" * 256), "modulus is not positive"),
        (ssh("ssh-rsa", b"\0" + number(3), number(2**2047 + 1)), "leading zeros"),
        (ssh("ssh-ed25519", bytes(31)), "32 bytes"),
        (ssh("ssh-ed25519", bytes(32), b""), "32 bytes"),
    ],
)
def test_what_is_no_public_key_is_named_with_what_is_wrong(text, problem):
    with pytest.raises(InvalidRequest, match=problem) as caught:
        age_recipients.check_recipients([text])
    assert "is no public key" in str(caught.value)
    assert len(str(caught.value)) < 300


def test_the_secret_key_is_not_taken_for_a_recipient_nor_repeated():
    secret = str(pyrage.x25519.Identity.generate())
    with pytest.raises(InvalidRequest) as caught:
        age_recipients.check_recipients([secret])
    assert secret[:20] not in str(caught.value)


@pytest.mark.parametrize("texts, told", [(["a"] * 11, "11 entries"), (["a" * 5000], "5000 characters")])
def test_number_and_length_of_keys_are_bounded(texts, told):
    with pytest.raises(InvalidRequest, match=told):
        age_recipients.check_bounds(texts, most=10, longest=4096)


async def test_a_panic_of_the_library_stays_in_the_child():
    with pytest.raises(ForeignCodeFailed, match="PanicException"):
        await call_outside(
            "spmd_tx.coordinator.checkpoints.age:check", {"recipients": [PANICS]}, Allowance(SECONDS)
        )
