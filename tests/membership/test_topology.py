"""Rank order, holes and buddies: what must hold for all labels."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from elastic3d.membership.topology import LEVELS, arrange, buddies, nearness, order, path_of
from elastic3d.parallel.mesh import place_of
from elastic3d.values import Cause, Generation, Layout, Node, Slot


def node(number: int, labels: dict[str, str] | None = None, *, slots: int = 1) -> Node:
    return Node(
        name=f"n{number}",
        incarnation="i",
        address="10.0.0.1",
        slots=tuple(Slot(tile_port=1) for _ in range(slots)),
        labels=labels or {},
    )


def labelled(*places: str, slots: int = 1) -> list[Node]:
    """Nodes n0, n1... with labels like "z1/r2": zone, then rack, switch, host."""
    return [
        node(number, {k: v for k, v in zip(LEVELS, place.split("/"), strict=False) if v}, slots=slots)
        for number, place in enumerate(places)
    ]


def names(nodes: Sequence[Node]) -> list[str]:
    return [n.name for n in nodes]


LABELS = st.dictionaries(st.sampled_from(LEVELS), st.sampled_from("abc"))
NODES = st.lists(LABELS, max_size=24).map(lambda all_labels: [node(at, one) for at, one in enumerate(all_labels)])


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[Node], Layout]:
    """Nodes of one to four slots and a layout that uses all of them."""
    slots = draw(st.sampled_from([1, 2, 4]))
    dp, pp = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    assume(dp * pp % slots == 0)
    labels = draw(st.lists(LABELS, min_size=dp * pp // slots, max_size=dp * pp // slots))
    return [node(at, one, slots=slots) for at, one in enumerate(labels)], Layout(pp=pp, dp=dp)


def chains(nodes: Sequence[Node], layout: Layout) -> list[list[Node]]:
    """The nodes of each pipeline, by the mesh's own arithmetic."""
    ranks = [n for n in nodes for _ in n.slots]
    holders: dict[int, list[Node]] = {}
    for rank, holder in enumerate(ranks):
        holders.setdefault(place_of(rank, layout).dp, []).append(holder)
    return list(holders.values())


def sealed(nodes: Sequence[Node]) -> Generation:
    return Generation(number=1, cause=Cause.START, nodes=tuple(nodes))


# Buddies.


def shared(nodes: Sequence[Node], permutation: Sequence[int]) -> tuple[int, ...]:
    """How many nodes share the zone, rack, switch, host with their buddy."""
    near = Counter(nearness(path_of(nodes[at]), path_of(nodes[to])) for at, to in enumerate(permutation))
    return tuple(sum(near[depth] for depth in range(level + 1, len(LEVELS) + 1)) for level in range(len(LEVELS)))


@given(NODES)
def test_every_node_is_the_buddy_of_exactly_one_other(nodes: list[Node]) -> None:
    """A permutation, without a fixed point for two or more nodes."""
    buddy_of = buddies(nodes)
    assert sorted(buddy_of) == list(range(len(nodes)))
    assert len(nodes) < 2 or all(at != to for at, to in enumerate(buddy_of))


@given(NODES)
def test_no_buddy_shares_a_domain_that_holds_at_most_half(nodes: list[Node]) -> None:
    """At every level: if no domain has more than half of the nodes, all copies are outside."""
    assume(len(nodes) > 1)
    buddy_of = buddies(nodes)
    for level in range(1, len(LEVELS) + 1):
        domains = [path_of(n)[:level] for n in nodes]
        if 2 * max(Counter(domains).values()) <= len(nodes):
            assert all(domains[at] != domains[to] for at, to in enumerate(buddy_of))


@given(st.lists(LABELS, min_size=2, max_size=6))
@example([{"zone": "a"}] * 4 + [{"zone": "b"}])
@example([{"zone": "a", "rack": rack} for rack in "aaabc"] + [{"zone": "b"}])
def test_no_other_permutation_shares_less(all_labels: list[dict[str, str]]) -> None:
    """Compared with all permutations without fixed points: none is better at any level, even at the cost of another."""
    nodes = [node(at, one) for at, one in enumerate(all_labels)]
    others = [
        shared(nodes, permutation)
        for permutation in itertools.permutations(range(len(nodes)))
        if all(at != to for at, to in enumerate(permutation))
    ]
    mine = shared(nodes, buddies(nodes))
    assert all(mine[level] == min(other[level] for other in others) for level in range(len(LEVELS)))


@given(NODES)
def test_all_nodes_compute_the_same_buddies(nodes: list[Node]) -> None:
    """Neither identity nor the order of labels matters, only the record."""
    copies = [replace(n, labels=dict(reversed(n.labels.items()))) for n in nodes]
    assert buddies(copies) == buddies(nodes)


@pytest.mark.parametrize("labels", [[""] * 5, ["z/r/s/h"] * 5, [f"z/r/s/h{n}" for n in range(5)]])
def test_uninformative_labels_leave_the_ring(labels: list[str]) -> None:
    """No labels, equal ones, or only each node's own host: the buddy is the next node in rank order."""
    assert buddies(labelled(*labels)) == (1, 2, 3, 4, 0)


@pytest.mark.parametrize(("count", "expected"), [(0, ()), (1, (0,)), (2, (1, 0))])
def test_buddies_of_one_and_two_nodes(count: int, expected: tuple[int, ...]) -> None:
    """Nobody; alone, a node keeps its own; two keep each other's."""
    assert buddies([node(number) for number in range(count)]) == expected


def test_ten_thousand_nodes_have_buddies_in_other_zones() -> None:
    """A cluster of four zones."""
    nodes = labelled(*(f"z{n % 4}/r{n % 100}/s{n % 500}/h{n}" for n in range(10_000)))
    assert shared(nodes, buddies(nodes)) == (0, 0, 0, 0)


# The first order.


@given(worlds())
def test_the_order_is_a_permutation_and_stable(world: tuple[list[Node], Layout]) -> None:
    """Nobody is lost; two nodes of one place in one pipeline keep their order of arrival."""
    nodes, layout = world
    placed = order(nodes, layout)
    assert sorted(names(placed)) == sorted(names(nodes))
    assert order(list(nodes), layout) == placed


@given(worlds())
def test_pipelines_stay_within_racks_that_hold_whole_ones(world: tuple[list[Node], Layout]) -> None:
    """If each rack holds a whole number of pipelines none leaves its rack, in whatever order nodes arrive."""
    nodes, layout = world
    slots = len(nodes[0].slots)
    assume(layout.dp % slots == 0)
    racked = [replace(n, labels={"rack": f"r{at % (layout.dp // slots) // 2}"}) for at, n in enumerate(nodes)]
    for chain in chains(order(racked, layout), layout):
        assert len({n.labels["rack"] for n in chain}) == 1


@given(worlds())
def test_racks_hold_as_many_whole_pipelines_as_fit(world: tuple[list[Node], Layout]) -> None:
    """With pipelines of k nodes, a rack of q nodes holds q // k of them whole."""
    nodes, layout = world
    slots = len(nodes[0].slots)
    assume(layout.dp % slots == 0)
    racks = Counter(path_of(n)[:2] for n in nodes)
    wanted = sum(held // layout.pp for held in racks.values()) * slots
    whole = sum(len({path_of(n)[:2] for n in chain}) == 1 for chain in chains(order(nodes, layout), layout))
    assert whole >= (wanted if len(racks) < len(nodes) else 0)


def test_pipelines_follow_racks() -> None:
    """pp 2 x dp 2 over two racks that arrive mixed: ranks 0 and 2 share a rack, and so do 1 and 3."""
    nodes = labelled("z/r1", "z/r2", "z/r1", "z/r2")
    assert names(order(nodes, Layout(pp=2, dp=2))) == ["n0", "n1", "n2", "n3"]
    nodes = labelled("z/r1", "z/r1", "z/r2", "z/r2")
    assert names(order(nodes, Layout(pp=2, dp=2))) == ["n0", "n2", "n1", "n3"]


def test_a_chain_is_cut_from_one_rack_before_racks_are_mixed() -> None:
    """Racks of 3, 4 and 1 nodes, chains of four: the rack of four is one chain, the others make up the second."""
    nodes = labelled(*["z/a"] * 3, *["z/b"] * 4, "z/c")
    placed = order(nodes, Layout(pp=4, dp=2))
    assert [[n.labels["rack"] for n in chain] for chain in chains(placed, Layout(pp=4, dp=2))] == [
        ["b", "b", "b", "b"],
        ["a", "a", "a", "c"],
    ]


def test_nodes_with_whole_stages_are_consecutive() -> None:
    """With dp inside the node, pipeline neighbours are the next nodes: racks follow one another."""
    nodes = labelled("z/a", "z/b", "z/a", "z/b", slots=2)
    assert [n.labels["rack"] for n in order(nodes, Layout(pp=4, dp=2))] == ["a", "a", "b", "b"]


@given(NODES)
def test_without_a_layout_near_nodes_have_consecutive_ranks(nodes: list[Node]) -> None:
    """In restart mode each zone is one run of ranks, if there are useful labels."""
    zones = [path_of(n)[0] for n in order(nodes, None)]
    runs = [zone for zone, _ in itertools.groupby(zones)]
    assert len(runs) == len(set(zones)) or names(order(nodes, None)) == names(nodes)


# Later generations.


@st.composite
def changes(draw: st.DrawFn, *, labels: st.SearchStrategy[dict[str, str]] = LABELS) -> tuple[Generation, list[Node]]:
    """A generation and the nodes of the next: some of its own, then some others."""
    count = draw(st.integers(1, 12))
    nodes = [node(at, draw(labels)) for at in range(count + draw(st.integers(0, 8)))]
    staying = draw(st.lists(st.sampled_from(range(count)), unique=True))
    return sealed(nodes[:count]), [*(nodes[at] for at in sorted(staying)), *nodes[count:]]


@given(changes(), st.integers(1, 6), st.integers(1, 6))
def test_survivors_keep_their_order_and_their_places(change: tuple[Generation, list[Node]], pp: int, dp: int) -> None:
    """Nobody is lost and survivors keep their order; if newcomers fill every hole, they keep their ranks."""
    previous, chosen = change
    assume(chosen)
    placed = arrange(previous, chosen, Layout(pp=pp, dp=dp))
    assert sorted(names(placed)) == sorted(names(chosen))
    before = [n for n in previous.nodes if n in chosen]
    assert [n for n in placed if n in before] == before
    if len(chosen) >= len(previous.nodes):
        assert all(placed[at] == n for at, n in enumerate(previous.nodes) if n in chosen)
    assert arrange(previous, list(chosen), Layout(pp=pp, dp=dp)) == placed


@given(changes(labels=st.just({})), st.sampled_from([None, Layout(pp=2, dp=2), Layout(pp=1, dp=5)]))
def test_without_labels_newcomers_fill_holes_in_order_of_arrival(
    change: tuple[Generation, list[Node]], layout: Layout | None
) -> None:
    """The first hole goes to the first that arrived, and so on."""
    previous, chosen = change
    newcomers = [n for n in chosen if n not in previous.nodes]
    expected = []
    for old in previous.nodes:
        if old in chosen:
            expected.append(old)
        elif newcomers:
            expected.append(newcomers.pop(0))
    assert arrange(previous, chosen, layout) == (*expected, *newcomers)
    assert arrange(None, chosen, layout) == tuple(chosen)


def test_a_hole_goes_to_the_newcomer_next_to_its_pipeline_neighbour() -> None:
    """pp 2 x dp 2: the second stage of the pipeline in rack a is lost; of two spares the one in rack a replaces it."""
    stood = labelled("z/a", "z/b", "z/a", "z/b")
    layout = Layout(pp=2, dp=2)
    spares = [replace(n, name=f"s{at}") for at, n in enumerate(labelled("z/c", "z/b", "z/a"))]
    placed = arrange(sealed(stood), [stood[0], stood[1], stood[3], *spares[:3]], layout)
    assert names(placed[:4]) == ["n0", "n1", "s2", "n3"]
    placed = arrange(sealed(stood), [stood[0], stood[1], stood[3], *spares[:2]], layout)
    assert names(placed[:4]) == ["n0", "n1", "s0", "n3"]


def test_a_hole_without_neighbours_goes_to_the_newcomer_nearest_to_its_last_node() -> None:
    """Both nodes of a pipeline are lost: each is replaced from its own rack."""
    stood = labelled("z/a", "z/b", "z/a", "z/b")
    spares = [replace(n, name=f"s{at}") for at, n in enumerate(labelled("z/c", "z/b", "z/b"))]
    placed = arrange(sealed(stood), [stood[0], stood[2], *spares], Layout(pp=2, dp=2))
    assert names(placed) == ["n0", "s1", "n2", "s2", "s0"]


def test_a_returning_node_is_a_newcomer() -> None:
    """Another incarnation of a name has no claim to the rank except by its place."""
    stood = labelled("z/a", "z/b")
    back = replace(stood[0], incarnation="later")
    assert arrange(sealed(stood), [stood[1], back], None) == (back, stood[1])


def test_half_of_ten_thousand_nodes_are_replaced_from_their_racks() -> None:
    """Five thousand holes are filled."""
    nodes = labelled(*(f"z{n % 4}/r{n % 100}" for n in range(10_000)))
    spares = [replace(n, name=f"s{at}") for at, n in enumerate(nodes)]
    placed = arrange(sealed(nodes), [*nodes[::2], *spares[1::2]], Layout(pp=10, dp=1000))
    assert all(path_of(new) == path_of(old) for new, old in zip(placed, nodes, strict=True))
