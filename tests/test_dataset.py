"""Dataset folders: shards that many writers add, and a reader that streams them."""

from __future__ import annotations

import functools
import json
import multiprocessing
import shutil
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

PUBLISHED = Path(__file__).parents[1] / "hub_cards" / "datasets" / "cpu-x86-64-v2"
MACHINE = "rocketlake-2"


@functools.cache
def published():
    """Tasks, design spaces, rows and machines of a published folder: reading them takes a while."""
    from pretune_export.dataset import read_parquet

    return read_parquet(PUBLISHED)


def taken(count):
    """Some published tasks, their design spaces, and their rows on one machine."""
    from pretune_export.networks import CorpusTask

    tasks, spaces, rows, machines = published()
    measured_here = {row["task"] for row in rows[MACHINE]}
    chosen = [
        CorpusTask(
            t["id"], tuple(t["networks"]), tuple(t["weights"]), t["split"], t["name"], 1,
            json.loads(t["shapes"]), t["flops"], 1, t["mod"],
        )
        for t in [task for task in tasks.values() if task["id"] in measured_here][:count]
    ]  # fmt: skip
    ids = {t.id for t in chosen}
    machine = {**machines[MACHINE], "name": "one"}
    return chosen, {t: spaces[t] for t in ids}, [r for r in rows[MACHINE] if r["task"] in ids], machine


def key(row, spaces):
    """A candidate, whatever the numbers of its design spaces."""
    return row["task"], json.dumps(spaces[row["task"]][row["space"]]), json.dumps(row["decisions"])


def measured(folder, machine="one"):
    """Latencies by candidate, each of which must be there once."""
    from pretune_export.dataset import read_parquet

    _tasks, spaces, rows, _machines = read_parquet(folder)
    found = {key(row, spaces): row["latencies"] for row in rows[machine]}
    assert len(found) == len(rows[machine])
    return found


def add(folder, part, parts, shards, tasks, spaces, rows, machine):
    """One of several writers, in a process of its own."""
    from pretune_export.dataset import write_parquet

    mine = rows[part::parts]
    for k in range(shards):
        write_parquet(folder, tasks, spaces, mine[k::shards], machine, append=True)


def test_many_writers_and_a_compaction_lose_nothing(tmp_path):
    from pretune.errors import InputError
    from pretune_export.dataset import compact

    processes = multiprocessing.get_context("spawn")
    everything = taken(6)
    writers = [processes.Process(target=add, args=(tmp_path, part, 3, 6, *everything)) for part in range(3)]
    for writer in writers:
        writer.start()
    compacted = 0
    while any(writer.is_alive() for writer in writers):
        try:
            compact(tmp_path)
            compacted += 1
        except InputError:  # Nobody has written yet.
            pass
    assert [writer.exitcode for writer in writers] == [0, 0, 0] and compacted
    _tasks, spaces, rows, _machine = everything
    want = {key(row, spaces): row["latencies"] for row in rows}
    assert measured(tmp_path) == want
    assert compact(tmp_path) == {"one": len(want)}
    assert measured(tmp_path) == want
    assert sorted(file.name for file in tmp_path.rglob("*.parquet")) == [
        "measured-one.parquet", "spaces.parquet", "tasks.parquet",
    ]  # fmt: skip


def test_of_a_candidate_measured_again_the_last_counts(tmp_path):
    from pretune_export.dataset import Dataset, compact, write_parquet

    tasks, spaces, rows, machine = taken(2)
    write_parquet(tmp_path, tasks, spaces, rows, machine)
    again = [{**row, "latencies": [k + 1.0], "ok": True} for k, row in enumerate(rows[::3])]
    # Whose writer has numbered the design spaces another way, and knows one more.
    other = {task: [[["more"]], *reversed(own)] for task, own in spaces.items()}
    for row in again:
        row["space"] = len(spaces[row["task"]]) - row["space"]
    write_parquet(tmp_path, tasks, other, again[:5], machine, append=True)
    write_parquet(tmp_path, tasks, other, again, {**machine, "days": '["2027-01-01"]'}, append=True)
    want = {key(row, spaces): row["latencies"] for row in rows}
    want |= {key(row, other): row["latencies"] for row in again}
    assert len(want) == len(rows) and measured(tmp_path) == want
    assert "2027-01-01" in json.loads(Dataset(tmp_path).machines["one"]["days"])
    assert compact(tmp_path) == {"one": len(rows)} and measured(tmp_path) == want

    # Without append, the rows take the place of all others of the machine, and of no other machine's.
    write_parquet(tmp_path, tasks, spaces, rows, {**machine, "name": "two"}, append=True)
    write_parquet(tmp_path, tasks, other, again, machine, append=True)
    write_parquet(tmp_path, tasks, spaces, rows[:4], machine)
    assert measured(tmp_path) == {key(row, spaces): row["latencies"] for row in rows[:4]}
    assert len(measured(tmp_path, "two")) == len(rows)


def test_who_reads_what_is_replaced_meanwhile_is_told(tmp_path):
    from pretune.errors import InputError
    from pretune_export.dataset import Dataset, write_parquet

    tasks, spaces, rows, machine = taken(2)
    write_parquet(tmp_path, tasks, spaces, rows, machine)
    data = Dataset(tmp_path)
    assert len(list(data.rows("one"))) == len(rows)
    write_parquet(tmp_path, tasks, spaces, rows[:4], machine)
    with pytest.raises(InputError, match=r"measured-one.parquet was replaced .* run again"):
        list(data.rows("one"))


def test_a_shard_that_is_being_written_is_not_replaced(tmp_path):
    from pretune_export.dataset import write_parquet

    tasks, spaces, rows, machine = taken(2)
    write_parquet(tmp_path, tasks, spaces, rows[:4], machine, append=True)
    (shard,) = (tmp_path / "shards").iterdir()
    partial = shard.rename(shard.with_name(shard.name + ".partial"))
    write_parquet(tmp_path, tasks, spaces, rows[4:], machine)
    partial.rename(shard)
    assert len(measured(tmp_path)) == len(rows)


def test_a_torn_shard_is_named_and_left_out(tmp_path, capsys):
    from pretune_export.dataset import write_parquet

    tasks, spaces, rows, machine = taken(2)
    write_parquet(tmp_path, tasks, spaces, rows[:5], machine, append=True)
    want = measured(tmp_path)
    (whole,) = (tmp_path / "shards").iterdir()
    torn, partial = whole.with_name("one-torn"), whole.with_name("one-killed.partial")
    for copy in (torn, partial):
        shutil.copytree(whole, copy)
        file = copy / "measured-one.parquet"
        file.write_bytes(file.read_bytes()[:-40])
    assert capsys.readouterr().err == ""
    assert measured(tmp_path) == want
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and any(line.startswith(f"notice: {torn} is left out: torn") for line in said)
    assert any(line.startswith(f"notice: {partial} is left out: still being written") for line in said)


def test_a_name_is_of_one_machine(tmp_path, capsys):
    from pretune.errors import OptionError
    from pretune_export.dataset import write_parquet

    tasks, spaces, rows, machine = taken(1)
    write_parquet(tmp_path, tasks, spaces, rows, machine, append=True)
    other = {**machine, "cores": "64"}
    with pytest.raises(OptionError, match=r"machine one has cores 64 here, but 2 in an earlier shard"):
        write_parquet(tmp_path, tasks, spaces, rows, other, append=True)
    # Neither is it when two write at the same time, when neither can see the other.
    write_parquet(tmp_path / "apart", tasks, spaces, rows, other, append=True)
    (shard,) = (tmp_path / "apart" / "shards").iterdir()
    shard.rename(tmp_path / "shards" / shard.name)
    assert len(measured(tmp_path)) == len(rows)
    assert "one has cores 64 here, but 2 in an earlier shard" in capsys.readouterr().err


def test_rows_are_streamed(tmp_path, monkeypatch):
    import pyarrow as pa
    import pyarrow.parquet as pq

    from pretune_export.dataset import Dataset, compact, read, write, write_parquet

    for module in (read, write):
        monkeypatch.setattr(module, "ROWS_AT_ONCE", 100)
    tasks, spaces, rows, machine = taken(60)
    many = [{**row, "policy": f"{n} " * 1000} for n in range(2) for row in rows]
    for n in range(2):
        write_parquet(tmp_path, tasks, spaces, many[n * len(rows) :][: len(rows)], machine, append=True)
    assert compact(tmp_path) == {"one": len(rows)}
    file = tmp_path / "measured-one.parquet"
    assert pq.ParquetFile(file).num_row_groups == -(-len(rows) // 100) > 9
    size = pq.read_table(file).nbytes
    data, most, got = Dataset(tmp_path), 0, []
    for row in data.rows("one"):
        most = max(most, pa.total_allocated_bytes())
        got.append(row)
    assert [(r["task"], r["decisions"], r["policy"]) for r in got] == [
        (r["task"], r["decisions"], "1 " * 1000) for r in rows
    ]
    assert most < size / 3


def test_published_folders_are_read_as_they_are():
    import pyarrow.parquet as pq

    from pretune_export.dataset import dataset_files, read_parquet

    assert dataset_files(PUBLISHED) == sorted(PUBLISHED.glob("*.parquet"))
    tasks, spaces, rows, _machines = read_parquet(PUBLISHED)
    assert list(tasks) == pq.read_table(PUBLISHED / "tasks.parquet")["task"].to_pylist()
    assert sum(map(len, spaces.values())) == pq.read_metadata(PUBLISHED / "spaces.parquet").num_rows
    for machine, own in rows.items():
        table = pq.read_table(PUBLISHED / f"measured-{machine}.parquet")
        for name in ("task", "space", "latencies", "time"):
            assert [row[name] for row in own] == table[name].to_pylist()
        flat = [[v for d in row["decisions"] for v in d] for row in own]
        assert flat == table["decisions"].to_pylist()
