from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elastic3d import Packed, TokenFile
from elastic3d.data import Batches
from elastic3d.errors import UsageError


def write(path: Path, tokens: Any, dtype: str = "uint16") -> Path:
    np.asarray(tokens, dtype=dtype).tofile(path)
    return path


def test_every_token_but_the_first_is_a_target_once(tmp_path: Path) -> None:
    """Windows of length + 1 tokens share their ends; targets are the inputs shifted by one."""
    data = TokenFile(write(tmp_path / "a.bin", range(13)), length=4)
    assert len(data) == 3
    targets = []
    for index in range(3):
        inputs, target = data[index]
        assert (inputs + 1).tolist() == target.tolist()
        assert str(inputs.dtype) == "torch.int64"
        targets += target.tolist()
    assert targets == list(range(1, 13))
    assert data.left_out == 0


def test_several_files_are_one_data_set_in_order_of_name(tmp_path: Path) -> None:
    """Windows do not span files; leftovers too short for a window are counted."""
    write(tmp_path / "b.bin", range(100, 108))
    write(tmp_path / "a.bin", range(11))
    write(tmp_path / "c.bin", [7])
    data = TokenFile(tmp_path / "*.bin", length=3)
    assert [data[index][0].tolist() for index in range(len(data))] == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7, 8],
        [100, 101, 102],
        [103, 104, 105],
    ]
    assert (data.left_out, data.tokens) == (2, 20)


def test_an_npy_file_gives_its_own_dtype(tmp_path: Path) -> None:
    """The header is read, and the tokens are those that numpy saved."""
    np.save(tmp_path / "a.npy", np.arange(70_000, 70_010, dtype=np.uint32))
    assert TokenFile(tmp_path / "a.npy", length=9)[0][1].tolist() == list(range(70_001, 70_010))


def test_a_token_data_set_pickles_small_and_maps_files_on_use(tmp_path: Path) -> None:
    """Another process maps the files anew."""
    data = TokenFile(write(tmp_path / "a.bin", np.arange(60_000)), length=8)
    assert data[7][0].tolist() == list(range(56, 64))
    pickled = pickle.dumps(data)
    assert len(pickled) < 1000
    assert pickle.loads(pickled)[7][1].tolist() == list(range(57, 65))


def test_token_files_load_ahead_in_a_thread_and_in_workers(tmp_path: Path) -> None:
    """The batches are equal however they are loaded."""
    data = TokenFile(write(tmp_path / "a.bin", np.arange(100)), length=8)
    rows = []
    for workers in (0, 2):
        batches = Batches(data, global_batch=4, micro_batch=2, seed=1, workers=workers)
        for batch in batches.until(step=4):
            rows.append([part.input.tolist() for part in batch.micro_batches])
            batches.step += 1
    assert rows[:4] == rows[4:]


def test_a_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the name of a file, and in a glob."""
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "a.bin", range(13))
    assert len(TokenFile("~/a.bin", length=4)) == len(TokenFile(["~/*.bin"], length=4)) == 3
    with pytest.raises(UsageError, match="TokenFile: path=7: give a path"):
        TokenFile([7], length=4)  # type: ignore[list-item]


def test_malformed_token_files_are_named(tmp_path: Path) -> None:
    """Size, dtype, shape and header are checked when the data set is made."""
    odd = tmp_path / "odd.bin"
    odd.write_bytes(b"abc")
    with pytest.raises(UsageError, match=r"odd.bin has 3 bytes, which is not a whole number of uint16"):
        TokenFile(odd, length=1)
    with pytest.raises(UsageError, match="there is no file"):
        TokenFile(tmp_path / "*.none", length=4)
    with pytest.raises(UsageError, match="no path"):
        TokenFile([], length=4)
    with pytest.raises(UsageError, match=r"none of 1 file.* the longest has 3"):
        TokenFile(write(tmp_path / "short.bin", range(3)), length=3)
    with pytest.raises(UsageError, match="not float32"):
        TokenFile(odd, length=1, dtype="float32")
    with pytest.raises(UsageError, match="'tokens' is not a dtype"):
        TokenFile(odd, length=1, dtype="tokens")
    with pytest.raises(UsageError, match="1 or more; it is 0"):
        TokenFile(odd, length=0)
    np.save(tmp_path / "matrix.npy", np.zeros((2, 3), dtype=np.uint16))
    with pytest.raises(UsageError, match=r"shape \[2, 3\]; save it flattened"):
        TokenFile(tmp_path / "matrix.npy", length=1)
    np.save(tmp_path / "cut.npy", np.zeros(50, dtype=np.uint16))
    (tmp_path / "cut.npy").write_bytes((tmp_path / "cut.npy").read_bytes()[:-20])
    with pytest.raises(UsageError, match="says that it has 50 tokens"):
        TokenFile(tmp_path / "cut.npy", length=1)
    (tmp_path / "torn.npy").write_bytes(b"\x93NUMPY\x01\x00\xff\xff{")
    with pytest.raises(UsageError, match="no valid header"):
        TokenFile(tmp_path / "torn.npy", length=1)


def test_samples_of_one_length_say_how_many_tokens_they_have(tmp_path: Path) -> None:
    """Of a data set that says nothing, none are counted; one that says nonsense is refused."""
    data = TokenFile(write(tmp_path / "a.bin", range(99)), length=8)
    assert Batches(data, global_batch=4, micro_batch=2, seed=1).sample_tokens == 8
    rows = Packed([list(range(5)), list(range(3))], length=8)
    assert Batches(rows, global_batch=2, micro_batch=1, seed=1).sample_tokens == 8
    assert Batches([(1, 2)] * 4, global_batch=2, micro_batch=1, seed=1).sample_tokens == 0
    for wrong in (0, -4, 2.0, "8", True):

        class Own(list[tuple[int, int]]):
            sample_tokens = wrong

        with pytest.raises(UsageError, match="give the number of tokens of each sample"):
            Batches(Own([(1, 2)] * 4), global_batch=2, micro_batch=1, seed=1)
