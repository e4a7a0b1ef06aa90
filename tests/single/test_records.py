import numpy as np

from hpcstrat import ReduceOp
from hpcstrat._communicators import records
from hpcstrat._communicators.records import COMMON, HEADER, PAYLOAD, RECORD, Signature, signature


def test_a_record_holds_what_was_put_in():
    digest = bytes(range(16))
    packed = records.pack(2**40, 2**50 + 1, records.LEAVING, digest, 2**33)
    assert COMMON < len(packed) == records.WHOLE <= HEADER and HEADER + PAYLOAD == RECORD
    buffer = np.zeros(RECORD, np.uint8)
    buffer[: len(packed)] = np.frombuffer(packed, np.uint8)
    for form in (packed, memoryview(buffer)):  # pyright: ignore[reportArgumentType]
        assert records.message_sizes([form]) == [2**33]
        assert records.read(form) == (2**40, 2**50 + 1, records.LEAVING, digest)


def test_the_size_is_no_part_of_what_must_agree():
    one, other = (records.pack(1, 0, records.OK, bytes(16), nbytes) for nbytes in (3, 4))
    assert one[:COMMON] == other[:COMMON] and one != other


def test_equal_facts_equal_signatures():
    one = signature("call", "SUM", (np.dtype("f4"), (3, 4)), None)
    assert one.text == str(one) == "call(SUM, (float32, (3, 4)), None)"
    assert len(one.digest) == 16
    assert one.digest == signature("call", "SUM", (np.dtype("<f4"), (3, 4)), None).digest


def test_different_facts_different_signatures():
    facts = [
        *[(call,) for call in ("a", "b", "a ")],
        *[("a", op.name) for op in ReduceOp],
        *[("a", np.dtype(dtype)) for dtype in ("f2", "f4", "f8", "i4", "u4", "c8", "?")],
        *[("a", shape) for shape in ((), (1,), (2,), (1, 2), (2, 1), (12,), ((1,), (2,)), ((1, 2), ()))],
    ]
    assert len({signature(*one).digest for one in facts}) == len(facts)


def test_numbers_are_part_of_it():
    plain = signature("call", (3,))
    found = [plain.with_numbers(numbers) for numbers in [(0.1,), (0.2,), (0.1, 0.0), (float(np.nextafter(0.1, 1)),)]]
    assert len({one.digest for one in [plain, *found]}) == 5
    assert found[0].digest == signature("call", (3,)).with_numbers((0.1,)).digest
    assert found[0].digest != signature("call", (4,)).with_numbers((0.1,)).digest
    assert str(found[2]) == "call((3,)) with (0.1, 0.0)"
    assert isinstance(found[0], Signature) and found[0].numbers == (0.1,)
