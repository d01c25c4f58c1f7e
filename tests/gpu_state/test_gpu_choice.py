"""gpucr.gpu_state.gpu_choice: the whole GPU map from what the user says, what the job had, and what is here."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterator, Sequence

import pytest

from gpucr.errors import InvalidRequest, Unsupported
from gpucr.gpu_state.gpu_choice import GpuChoice, GpuRequest, GpuUser, choose_gpus, find_gpu
from gpucr.model import Gpu, GpuMap

GIB = 1 << 30
H200, L4 = "NVIDIA H200", "NVIDIA L4"


def uuid(number: int) -> str:
    return f"GPU-{number:08x}-0000-4000-8000-{number:012x}"


def machine(*free_gib: int, models: Sequence[str] = (), first: int = 0, mig: Collection[int] = ()) -> list[Gpu]:
    """GPUs with so much free memory each. ``first`` makes other UUIDs: another machine."""
    names = models or [H200] * len(free_gib)
    return [
        Gpu(index, uuid(first + index), name, 100 * GIB, free * GIB, mig_enabled=index in mig)
        for index, (free, name) in enumerate(zip(free_gib, names, strict=True))
    ]


def user(gpus: Sequence[Gpu], *held_gib: int, pid: int = 1) -> GpuUser:
    """A process that knows these GPUs and holds so much on each (0: does not use it)."""
    held = {gpu.uuid: gib * GIB for gpu, gib in zip(gpus, held_gib, strict=False) if gib}
    return GpuUser(pid, tuple(gpu.uuid for gpu in gpus), held)


def places(choice: GpuChoice, had: Sequence[Gpu], here: Sequence[Gpu]) -> list[int]:
    """The index here of each GPU that the job had."""
    by_uuid = {gpu.uuid: gpu.index for gpu in here}
    assert choice.gpu_map is not None
    return [by_uuid[choice.gpu_map.new_for(gpu.uuid)] for gpu in had]


# --- what the user says ----------------------------------------------------------------------------------------


def test_no_request_gives_no_map() -> None:
    had = machine(1, 1)
    choice = choose_gpus(GpuRequest(), had, [user(had, 50)], machine(1, 1, first=50))
    assert (choice.gpu_map, choice.reasons, choice.had) == (None, (), tuple(had))
    assert choice.needed_bytes == {uuid(0): 50 * GIB}
    assert choice.for_process(1) is None


@pytest.mark.parametrize(
    "text", ["0=1", f"{uuid(0)}={uuid(1)}", "GPU-00000000=GPU-00000001", f"gpu-00000000 = {uuid(1).upper()}"]
)
def test_a_part_of_the_map_is_completed_to_a_swap(text: str) -> None:
    both = machine(10, 10)
    choice = choose_gpus(GpuRequest.of(text, None), both, [user(both, 2)], both)
    assert choice.gpu_map == GpuMap(((uuid(0), uuid(1)), (uuid(1), uuid(0))))
    (reason,) = choice.reasons
    assert "GPU 1 (GPU-00000001), which the job does not use, goes to GPU 0" in reason


def test_unnamed_gpus_stay_where_possible() -> None:
    four = machine(10, 10, 10, 10)
    choice = choose_gpus(GpuRequest.of("0=2", None), four, [user(four, 2, 2, 2, 2)], four)
    assert places(choice, four, four) == [2, 1, 0, 3]


def test_indices_refer_to_each_machine() -> None:
    had, here = machine(10, 10), machine(10, 10, 10, first=50)
    choice = choose_gpus(GpuRequest.of("1=2", None), had, [user(had, 2, 2)], here)
    assert places(choice, had, here) == [0, 2]


def test_the_map_of_a_process_has_only_its_visible_gpus() -> None:
    four = machine(10, 10, 10, 10)
    users = [user(four[:1], 2, pid=1), user(four[1:3], 2, 2, pid=2)]
    choice = choose_gpus(GpuRequest.of("0=3,2=0", None), four, users, four)
    assert choice.had == tuple(four[:3])
    assert choice.for_process(1) == GpuMap(((uuid(0), uuid(3)),))
    assert choice.for_process(2) == GpuMap(((uuid(1), uuid(1)), (uuid(2), uuid(0))))
    assert choice.for_process(3) is None


def test_an_identity_map_is_no_map() -> None:
    both = machine(10, 10)
    assert choose_gpus(GpuRequest.of("0=0", None), both, [user(both, 2)], both).gpu_map is None


def test_a_complete_map_of_uuids_is_used_unchanged() -> None:
    both = machine(10, 10)
    swap = GpuMap(((uuid(0), uuid(1)), (uuid(1), uuid(0))))
    assert choose_gpus(GpuRequest.of(swap, None), both, [user(both, 2)], both).gpu_map == swap


@pytest.mark.parametrize(("gpu", "expected"), [("1", [1, 0, 2]), ("GPU-00000002", [2, 1, 0]), (" 2 ", [2, 1, 0])])
def test_the_gpus_in_use_go_where_gpu_says(gpu: str, expected: list[int]) -> None:
    three = machine(10, 10, 10)
    choice = choose_gpus(GpuRequest.of(None, gpu), three, [user(three, 2)], three)
    assert places(choice, three, three) == expected


def test_several_gpus_are_assigned_in_order() -> None:
    four = machine(10, 10, 10, 10)
    choice = choose_gpus(GpuRequest.of(None, "3,0"), four, [user(four, 0, 2, 2)], four)
    assert places(choice, four, four)[1:3] == [3, 0]


def test_without_figures_every_visible_gpu_counts_as_used() -> None:
    both, here = machine(10, 10), machine(10, 10, first=50)
    choice = choose_gpus(GpuRequest.of(None, "1,0"), both, [user(both)], here)
    assert places(choice, both, here) == [1, 0]
    with pytest.raises(InvalidRequest, match="the job uses 2 GPUs, and --gpu names 1"):
        choose_gpus(GpuRequest.of(None, "1"), both, [user(both)], here)


def test_a_process_without_gpus_needs_no_figures() -> None:
    both = machine(10, 10)
    choice = choose_gpus(GpuRequest.of(None, "1"), both, [user(both, pid=1), user(both, 2, pid=2)], both)
    assert places(choice, both, both) == [1, 0]


# --- what is invalid --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu_map", "gpu", "message"),
    [
        ("0", None, "'0' is not of the form OLD=NEW"),
        ("", None, "is not of the form OLD=NEW"),
        ("0=1,", None, "'' is not of the form OLD=NEW"),
        ("=1", None, "'=1' is not of the form OLD=NEW"),
        ("0=", None, "'0=' is not of the form OLD=NEW"),
        ("7=1", None, "there is no GPU 7 where the job ran"),
        ("0=7", None, "there is no GPU 7 on this machine"),
        ("0=GPU-ff", None, "there is no GPU GPU-ff on this machine"),
        ("0=GPU-0000000", None, "GPU-0000000 can be 2 GPUs on this machine"),
        ("0=GPU-", None, "'GPU-' names no GPU"),
        ("0=-1", None, "'-1' names no GPU"),
        ("0=1=0", None, "'1=0' names no GPU"),
        ("0=\N{SUPERSCRIPT ONE}", None, "names no GPU"),
        ("0=one", None, "'one' names no GPU"),
        ("0=MIG-6b1e4d2c", None, "'MIG-6b1e4d2c' names no GPU"),
        (f"0=1,{uuid(0)}=0", None, r"GPU 0 \(GPU-00000000\) appears twice on the left side"),
        ("0=1,1=GPU-00000001", None, r"GPU 1 \(GPU-00000001\) appears twice on the right side"),
        (None, "1,1", r"the job uses 1 GPU, and --gpu names 2"),
        (None, "", "'' does not name GPUs"),
        (None, "1,,0", "'1,,0' does not name GPUs"),
        (None, "7", "there is no GPU 7 on this machine"),
        ("0=1", "auto", "--gpu and --gpu-map both say where the job goes"),
    ],
)  # fmt: skip
def test_invalid_requests(gpu_map: str | None, gpu: str | None, message: str) -> None:
    both = machine(10, 10)
    with pytest.raises(InvalidRequest, match=message) as caught:
        choose_gpus(GpuRequest.of(gpu_map, gpu), both, [user(both, 2)], both)
    assert caught.value.hint


def test_one_target_for_two_gpus() -> None:
    both = machine(10, 10)
    with pytest.raises(InvalidRequest, match=r"--gpu names GPU 1 \(GPU-00000001\) twice"):
        choose_gpus(GpuRequest.of(None, "1,1"), both, [user(both, 2, 2)], both)


def test_a_gpu_no_process_can_see() -> None:
    both = machine(10, 10)
    with pytest.raises(InvalidRequest, match="there is no GPU 1 where the job ran") as caught:
        choose_gpus(GpuRequest.of("1=0", None), both, [user(both[:1], 2)], both)
    assert caught.value.hint == f"its GPUs are 0: {uuid(0)}"


def test_a_job_without_gpus_has_none_to_place() -> None:
    here = machine(10)
    for asked in (GpuRequest.of("0=0", None), GpuRequest.of(None, "0")):
        with pytest.raises(InvalidRequest, match="no suspended device memory") as caught:
            choose_gpus(asked, [], [], here)
        assert "gpucr move" in str(caught.value.hint)
    assert choose_gpus(GpuRequest.of(None, "auto"), [], [], here).gpu_map is None


def test_a_whole_uuid_without_its_prefix() -> None:
    gpus = machine(10, 10)
    bare = gpus[1].uuid.removeprefix("GPU-")
    assert find_gpu(bare, gpus, "here") == find_gpu(bare.upper(), gpus, "here") == gpus[1]
    with pytest.raises(InvalidRequest, match="names no GPU"):
        find_gpu(bare[:8] + "-", gpus, "here")


def test_an_ambiguous_index() -> None:
    """A job that was suspended on one machine and restored on another has GPUs of both."""
    had = [*machine(10), *machine(10, first=50)]
    with pytest.raises(InvalidRequest, match="0 can be 2 GPUs where the job ran"):
        find_gpu("0", had, "where the job ran")


# --- what cannot be done ---------------------------------------------------------------------------------------


def test_fewer_gpus_than_the_job_had() -> None:
    had, here = machine(*[10] * 8), machine(*[10] * 4, first=50)
    with pytest.raises(Unsupported) as caught:
        choose_gpus(GpuRequest.of(None, "auto"), had, [user(had, 2)], here)
    assert caught.value.message.startswith(
        f"the job ran on a machine with 8 GPUs ({H200}) and uses 1; this machine has 4 of that model"
    )
    assert "a place for every GPU of the machine: 4 too few" in caught.value.message
    assert caught.value.hint == "restore it on a machine with as many"


def test_a_job_that_sees_only_its_own_gpus_needs_no_more() -> None:
    had, here = machine(*[10] * 8), machine(*[10] * 4, first=50)
    choice = choose_gpus(GpuRequest.of(None, "auto"), had, [user(had[6:7], 2)], here)
    assert places(choice, had[6:7], here) == [0]


@pytest.mark.parametrize("request_text", ["auto", "0"])
def test_another_model(request_text: str) -> None:
    had, here = machine(10), machine(80, models=[L4], first=50)
    request = GpuRequest.of(None, request_text)
    if request.auto:
        with pytest.raises(Unsupported, match=f"this machine has 0 of that model .its GPUs: {L4}."):
            choose_gpus(request, had, [user(had, 2)], here)
    else:  # what the user names is preflight's to judge, and --force insists on it
        assert places(choose_gpus(request, had, [user(had, 2)], here), had, here) == [0]


def test_each_gpu_goes_to_its_own_model() -> None:
    had = machine(10, 10, 10, models=[H200, L4, H200])
    here = machine(10, 10, 10, models=[L4, H200, H200], first=50)
    choice = choose_gpus(GpuRequest.of(None, "auto"), had, [user(had, 2, 2, 2)], here)
    assert [here[index].name for index in places(choice, had, here)] == [H200, L4, H200]


def test_gpus_in_mig_mode_are_not_chosen() -> None:
    had, here = machine(10), machine(90, 10, first=50, mig=[0])
    assert places(choose_gpus(GpuRequest.of(None, "auto"), had, [user(had, 2)], here), had, here) == [1]
    with pytest.raises(Unsupported, match="this machine has 0 of that model"):
        choose_gpus(GpuRequest.of(None, "auto"), had, [user(had, 2)], machine(90, first=50, mig=[0]))


def test_an_unused_gpu_in_mig_mode_stays() -> None:
    here = machine(10, 90, 10, mig=[1])
    choice = choose_gpus(GpuRequest.of(None, "2"), here, [user(here, 2)], here)
    assert places(choice, here, here) == [2, 1, 0]
    choice = choose_gpus(GpuRequest.of("0=1", None), here, [user(here, 2)], machine(10, 90, 10, 10, mig=[1]))
    assert places(choice, here, machine(10, 90, 10, 10)) == [1, 0, 2]  # what the user names is preflight's to judge


def test_no_room_anywhere() -> None:
    both = machine(1, 3)
    with pytest.raises(Unsupported) as caught:
        choose_gpus(GpuRequest.of(None, "auto"), both, [user(both, 4)], both)
    assert caught.value.message == (
        "no choice of GPUs has room for the job: it needs 4.0 GiB (GPU 0 (GPU-00000000)); "
        "free are 1.0 GiB (GPU 0 (GPU-00000000)), 3.0 GiB (GPU 1 (GPU-00000001))"
    )


def test_a_map_is_completed_even_without_room() -> None:
    """The user has named GPUs: preflight says what is missing, and --force insists."""
    both = machine(10, 1)
    choice = choose_gpus(GpuRequest.of("1=0", None), both, [user(both, 4, 4)], both)
    assert places(choice, both, both) == [1, 0]


# --- auto ------------------------------------------------------------------------------------------------------


def test_auto_stays_where_there_is_room() -> None:
    both = machine(10, 90)
    choice = choose_gpus(GpuRequest.of(None, "auto"), both, [user(both, 4)], both)
    assert choice.gpu_map is None
    assert choice.reasons == ("GPU 0 (GPU-00000000) stays (10.0 GiB free, 4.0 GiB needed)",)


def test_auto_leaves_a_full_gpu_for_the_emptiest() -> None:
    four = machine(1, 20, 90, 30)
    choice = choose_gpus(GpuRequest.of(None, "auto"), four, [user(four, 4)], four)
    assert places(choice, four, four) == [2, 1, 0, 3]
    assert choice.reasons[0] == (
        "GPU 0 (GPU-00000000) goes to GPU 2 (GPU-00000002) (90.0 GiB free, 4.0 GiB needed): it has 1.0 GiB free"
    )
    assert choice.reasons[1].startswith("GPU 2 (GPU-00000002), which the job does not use, goes to GPU 0")


def test_auto_leaves_a_gpu_that_others_use() -> None:
    three = machine(50, 50, 40)
    choice = choose_gpus(GpuRequest.of(None, "auto"), three, [user(three, 4)], three, busy={uuid(0), uuid(1)})
    assert places(choice, three, three)[0] == 2
    assert choice.reasons[0].endswith(": another process uses it")


def test_auto_shares_its_own_gpu_where_all_are_in_use() -> None:
    both = machine(50, 90)
    choice = choose_gpus(GpuRequest.of(None, "auto"), both, [user(both, 4)], both, busy={uuid(0), uuid(1)})
    assert choice.gpu_map is None


def test_a_named_gpu_is_used_even_if_others_use_it() -> None:
    both = machine(50, 90)
    choice = choose_gpus(GpuRequest.of("0=1", None), both, [user(both, 4)], both, busy={uuid(0), uuid(1)})
    assert places(choice, both, both) == [1, 0]


def test_a_gpu_that_could_stay_does_not_take_another_ones_only_room() -> None:
    """GPU 0 could stay on its own, but only there is room for what GPU 1 held."""
    both = machine(50, 5)
    choice = choose_gpus(GpuRequest.of(None, "auto"), both, [user(both, 4, 40)], both)
    assert places(choice, both, both) == [1, 0]
    assert choice.reasons[0].endswith(": it is taken by another GPU of the job")


def test_an_unused_gpu_does_not_block_a_move_to_an_idle_one() -> None:
    both = machine(50, 50)
    choice = choose_gpus(GpuRequest.of(None, "auto"), both, [user(both, 4)], both, busy={uuid(0)})
    assert places(choice, both, both) == [1, 0]


def test_memory_of_several_processes_on_one_gpu_adds_up() -> None:
    both = machine(5, 7)
    users = [user(both, 3, pid=1), user(both, 3, pid=2)]
    choice = choose_gpus(GpuRequest.of(None, "auto"), both, users, both)
    assert choice.needed_bytes == {uuid(0): 6 * GIB}
    assert places(choice, both, both) == [1, 0]


# --- properties ------------------------------------------------------------------------------------------------


def cases() -> Iterator[tuple[random.Random, list[Gpu], list[GpuUser], list[Gpu]]]:
    """Jobs and machines of up to 5 GPUs and 2 models: the same machine, or another one."""
    for seed in range(1500):
        rng = random.Random(seed)  # noqa: S311 - no secrets
        count = rng.randint(1, 5)
        models = [rng.choice([H200, H200, L4]) for _ in range(count)]
        had = machine(*[0] * count, models=models)
        if rng.random() < 0.5:
            here = machine(*[rng.randint(0, 9) for _ in range(count)], models=models)
        else:
            there = rng.randint(1, 5)
            kinds = [rng.choice([H200, H200, L4]) for _ in range(there)]
            here = machine(*[rng.randint(0, 9) for _ in range(there)], models=kinds, first=50)
        users = [
            user(rng.sample(had, rng.randint(1, count)), *[rng.choice([0, 1, 4, 8]) for _ in range(count)], pid=pid)
            for pid in range(1, rng.randint(1, 3) + 1)
        ]
        yield rng, had, users, here


def fitting_maps(job: Sequence[Gpu], here: Sequence[Gpu], needed: dict[str, int]) -> Iterator[tuple[Gpu, ...]]:
    """By brute force: every way to place the job's GPUs on their own model with enough memory."""
    for chosen in itertools.permutations(here, len(job)):
        if all(
            new.name == old.name and new.memory_free_bytes >= needed.get(old.uuid, 0)
            for old, new in zip(job, chosen, strict=True)
        ):
            yield chosen


def test_auto_finds_a_place_exactly_where_there_is_one() -> None:
    refused = 0
    for _, had, users, here in cases():
        seen = {gpu_uuid for each in users for gpu_uuid in each.known}
        job = [gpu for gpu in had if gpu.uuid in seen]
        possible = list(fitting_maps(job, here, dict(choose_gpus(GpuRequest(), had, users, here).needed_bytes)))
        try:
            choice = choose_gpus(GpuRequest.of(None, "auto"), had, users, here)
        except Unsupported:
            refused += 1
            assert not possible
            continue
        new_by_uuid = {gpu.uuid: gpu for gpu in here}
        chosen = tuple(new_by_uuid[choice.gpu_map.new_for(g.uuid) if choice.gpu_map else g.uuid] for g in job)
        assert chosen in possible
    assert 100 < refused < 1400


def test_a_completed_map_satisfies_the_driver() -> None:
    completed = 0
    for rng, had, users, here in cases():
        seen = {gpu_uuid for each in users for gpu_uuid in each.known}
        job = [gpu for gpu in had if gpu.uuid in seen]
        count = rng.randint(1, min(len(job), len(here)))
        named = dict(zip(rng.sample(job, count), rng.sample(here, count), strict=True))
        text = ",".join(f"{old.index}={new.index}" for old, new in named.items())
        try:
            choice = choose_gpus(GpuRequest.of(text, None), had, users, here)
        except Unsupported:
            left = [gpu for gpu in job if gpu not in named]
            free = [gpu for gpu in here if gpu not in named.values()]
            assert next(fitting_maps(left, free, {}), None) is None
            continue
        if choice.gpu_map is None:
            assert all(old.uuid == new.uuid for old, new in named.items())
            continue
        completed += 1
        pairs = dict(choice.gpu_map.pairs)
        assert set(pairs) == seen
        assert len(set(pairs.values())) == len(pairs)
        assert {old: pairs[old] for old in (gpu.uuid for gpu in named)} == {o.uuid: n.uuid for o, n in named.items()}
        for each in users:
            mine = choice.for_process(each.pid)
            assert mine is not None
            assert {old for old, _ in mine.pairs} == set(each.known)
    assert completed > 500
