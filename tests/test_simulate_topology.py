"""Topology files: what they describe, and what is wrong with bad ones, by line."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from collectives import simulate
from collectives.errors import ConfigError, TopologyError
from collectives.simulate import quantities
from collectives.simulate.network import Network
from collectives.simulate.topology import with_ranks

pytest.importorskip("yaml", reason="topology files need PyYAML")

RACKS = Path(__file__).resolve().parents[1] / "examples/topologies/two-racks.yaml"

GOOD = """\
name: small
nodes: 2
gpus: 2
devices:
  switch: {per: node}
  fabric: {per: all}
links:
  - {name: inside, from: gpu, to: switch, bandwidth: 100 GB/s, latency: 1 us}
  - {name: cable, from: gpu, to: fabric, bandwidth: 100 Gb/s, latency: 2 us}
"""


def read(tmp_path, text):
    file = tmp_path / "t.yaml"
    file.write_text(text, encoding="utf-8")
    return simulate.read(file)


def way(topology, src, dst):
    network = Network(topology)
    routes = network.routes(np.array([src]), np.array([dst]))
    return [network.label(int(link)) for link in routes.links[0] if link >= 0]


# ---- what is read --------------------------------------------------------------------------------


def test_a_file_is_read(tmp_path):
    topology = read(tmp_path, GOOD)
    assert (topology.name, topology.nodes, topology.nranks) == ("small", 2, 4)
    assert topology.links[0].bandwidth == 100e9
    assert topology.links[1].bandwidth == 12.5e9
    assert topology.links[1].latency_s == 2e-6
    assert topology.nodes_of_ranks == [0, 0, 1, 1]


def test_links_side_by_side_count_as_one(tmp_path):
    topology = read(tmp_path, GOOD.replace("bandwidth: 100 GB/s", "bandwidth: 100 GB/s, count: 4"))
    assert topology.links[0].bandwidth == 400e9


def test_the_example_is_what_the_docs_show():
    import yaml

    page = (RACKS.parents[2] / "docs/simulate.md").read_text(encoding="utf-8")
    shown = page.partition("```yaml\n")[2].partition("```")[0]
    assert yaml.safe_load(shown) == yaml.safe_load(RACKS.read_text(encoding="utf-8"))


def test_fewer_nodes_have_fewer_faults():
    topology = simulate.read(RACKS)
    assert [f.node for f in topology.faults] == [2, 5]
    assert [f.node for f in topology.with_nodes(3).faults] == [2]
    assert with_ranks(topology, 3).faults == ()


def test_uneven_nodes(tmp_path):
    topology = read(tmp_path, GOOD.replace("nodes: 2\ngpus: 2", "gpus: [3, 2, 1]"))
    assert topology.nodes_of_ranks == [0, 0, 0, 1, 1, 2]
    with pytest.raises(ConfigError, match="lists the GPUs of each of its 3 nodes"):
        topology.with_nodes(4)
    name = "hierarchical(direct_two_shot, ring)"
    assert simulate.simulate(name, "all_reduce", 1 << 20, topology).ranks == 6


@pytest.mark.parametrize("name", simulate.presets())
def test_presets_run(name):
    """Every preset joins all its ranks, at sizes below and above a leaf."""
    for nodes in (1, 2, 40):
        topology = simulate.load(name, nodes)
        assert topology.flops > 0
        for algorithm, collective in (("direct_two_shot", "all_to_all"), ("ring", "all_gather")):
            assert simulate.simulate(algorithm, collective, 1 << 16, topology).seconds > 0


def test_published_figures_of_the_dgx_h100():
    links = {link.name: link for link in simulate.load("dgx-h100").links}
    assert links["nvlink"].bandwidth == pytest.approx(450e9 * 0.81)
    assert links["ndr"].bandwidth == pytest.approx(400e9 / 8 * 0.99)


def test_ways_are_the_shortest():
    topology = simulate.load("dgx-h100", 64)
    assert way(topology, 0, 7) == ["nvlink of gpu 0, up", "nvlink of gpu 7, down"]
    same_rail = way(topology, 3, 11)
    assert same_rail[1] == "ndr of nic 3, up" and not any("uplink" in w for w in same_rail)
    assert any("uplink" in w for w in way(topology, 0, 9))  # another rail: over the spine
    assert any("uplink" in w for w in way(topology, 0, 8 * 40))  # another leaf


def test_pcie_shares_links():
    """Two GPUs below one PCIe switch share its way up to the socket."""
    topology = simulate.load("pcie-100gbe")
    assert way(topology, 0, 1) == ["pcie of gpu 0, up", "pcie of gpu 1, down"]
    assert way(topology, 1, 2)[1] == way(topology, 0, 2)[1] == "pcie-up of plx 0, up"


def test_the_last_leaf_has_as_many_links_up_as_the_others(tmp_path):
    """Five nodes in leaves of two: the last leaf is for two nodes as well."""
    text = GOOD.replace("nodes: 2", "nodes: 5").replace(
        "fabric: {per", "leaf: {per: 2 nodes}\n  fabric: {per"
    )
    text = text.replace("to: fabric", "to: leaf")
    text += "  - {name: up, from: leaf, to: fabric, oversubscription: 2, latency: 1 us}\n"
    network = Network(read(tmp_path, text))
    assert network.capacity[dict(network.links_by_kind())["up"]] == pytest.approx(4 * 12.5e9 / 2)


def test_the_example_has_what_it_says():
    topology = simulate.read(RACKS)
    network = Network(topology)
    by_kind = dict(network.links_by_kind())
    uplinks = network.capacity[by_kind["uplink"]]
    # Eight NICs of a rack, one of them at half its bandwidth from a fault that came later.
    assert uplinks == pytest.approx(8 * 12.5e9 * 0.95 / 4)
    cables = network.capacity[by_kind["cable"]]
    assert sorted(set(cables.round())) == pytest.approx([12.5e9 * 0.95 / 2, 12.5e9 * 0.95])
    assert (network.late_s > 0).sum() == 1 and network.late_s[5 * 4 + 3] == pytest.approx(20e-6)
    healthy = simulate.simulate("ring", "all_reduce", 1 << 24, topology)
    assert healthy.ranks == 32


def test_ranks_fill_nodes():
    topology = simulate.load("dgx-h100")
    assert with_ranks(topology, 4).nranks == 4
    assert with_ranks(topology, 64).nodes == 8
    with pytest.raises(ConfigError, match="12 ranks do not fill nodes of 8"):
        with_ranks(topology, 12)


# ---- faults --------------------------------------------------------------------------------------


def test_a_broken_nic_is_gone_round(tmp_path):
    """Over a neighbour's NIC, inside the node first."""
    text = GOOD + "faults:\n  - {link: cable, node: 0, gpu: 0, broken: true}\n"
    topology = read(tmp_path, text)
    assert way(topology, 0, 1) == ["inside of gpu 0, up", "inside of gpu 1, down"]
    assert way(topology, 0, 2) == [
        "inside of gpu 0, up",
        "inside of gpu 1, down",
        "cable of gpu 1, up",
        "cable of gpu 2, down",
    ]
    assert way(topology, 3, 0)[0] == "cable of gpu 3, up"
    whole = simulate.simulate("ring", "all_reduce", 1 << 24, read(tmp_path, GOOD))
    broken = simulate.simulate("direct_two_shot", "all_reduce", 1 << 24, topology)
    assert broken.seconds > whole.seconds


def test_a_way_round_takes_the_latency_of_both_parts(tmp_path):
    """Inside the node up and down, 1 us each, then by cable up and down, 2 us each."""
    text = GOOD + "faults:\n  - {link: cable, node: 0, gpu: 0, broken: true}\n"
    routes = Network(read(tmp_path, text)).routes(np.array([0, 1]), np.array([2, 2]))
    assert routes.latency_s == pytest.approx([6e-6, 4e-6])


def test_a_broken_switch_link_goes_by_the_network(tmp_path):
    text = GOOD + "faults:\n  - {link: inside, node: 0, gpu: 0, broken: true}\n"
    assert way(read(tmp_path, text), 0, 1) == ["cable of gpu 0, up", "cable of gpu 1, down"]


def test_no_way_left(tmp_path):
    text = (
        GOOD
        + "faults:\n  - {link: cable, node: 0, gpu: 0, broken: true}\n"
        + "  - {link: cable, node: 0, gpu: 1, broken: true}\n"
    )
    with pytest.raises(TopologyError, match=r"line 11, 12: .*no way is left between rank 1"):
        simulate.simulate("ring", "all_reduce", 8, read(tmp_path, text))


def test_rails_without_a_spine_go_through_the_node(tmp_path):
    """As PXN does: first to the GPU on the receiver's rail, then along it."""
    text = GOOD.replace("fabric: {per: all}", "nic: {per: gpu}\n  fabric: {per: all, rails: nic}")
    text = text.replace("from: gpu, to: fabric", "from: nic, to: fabric")
    text += "  - {name: pcie, from: gpu, to: nic, bandwidth: 32 GB/s, latency: 1 us}\n"
    steps = way(read(tmp_path, text), 0, 3)
    assert steps[:2] == ["inside of gpu 0, up", "inside of gpu 1, down"]
    assert steps[2:4] == ["pcie of gpu 1, up", "cable of nic 1, up"]


# ---- bad files -----------------------------------------------------------------------------------

_LINK = "  - {name: inside, from: gpu, to: switch, bandwidth: 100 GB/s, latency: 1 us}\n"


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("100 GB/s", "0 GB/s", 8, "moves nothing"),
        ("100 GB/s", "-5 GB/s", 8, "moves nothing"),
        ("100 GB/s", "100", 8, "has no unit: write a bandwidth such as"),
        ("100 GB/s", "'100'", 8, "has no unit"),
        ("100 GB/s", "100 GBps", 8, "unknown unit 'GBps'; did you mean 'GB/s'"),
        ("100 GB/s", "fast", 8, "is not a bandwidth such as"),
        ("latency: 1 us", "latency: 1", 8, "has no unit: write a time such as"),
        ("latency: 1 us", "latency: -1 us", 8, "negative"),
        (", latency: 1 us", "", 8, "has no 'latency'; add a line"),
        ("latency: 1 us", "latensy: 1 us", 8, "no key 'latensy'; did you mean 'latency'"),
        ("100 GB/s", "100 GiB/s", 8, "unknown unit 'GiB/s'; did you mean 'GB/s'"),
        ("100 GB/s", "100 gb/s", 8, "unknown unit 'gb/s'; did you mean 'Gb/s'"),
        ("100 GB/s", "100 GBs", 8, "unknown unit 'GBs'; did you mean 'GB/s'"),
        ("nodes: 2", "nodes: 2\nengine: {slots: 1000000000}", 3, "is more than 4096"),
        ("nodes: 2", "nodes: 2\nengine: {lanes: 1000000000}", 3, "is more than 4096"),
        ("bandwidth: 100 GB/s, ", "", 8, "link inside has no bandwidth"),
        ("latency: 1 us", "latency: 1 us, oversubscription: 2", 8, "both bandwidth and"),
        ("bandwidth: 100 GB/s", "oversubscription: 2", 8, "nothing comes from below a GPU"),
        ("latency: 1 us", "latency: 1 us, bandwith: 2", 8, "no key 'bandwith'; did you mean"),
        ("to: switch", "to: swich", 8, "unknown name 'swich'; did you mean 'switch'"),
        ("from: gpu, to: switch", "from: switch, to: gpu", 8, "up to a GPU, which closes a loop"),
        ("from: gpu, to: switch", "from: switch, to: switch", 8, "the loop switch -> switch"),
        (_LINK, "", 5, "no link leads from a gpu up to switch"),
        ("name: cable", "name: inside", 9, "two links named 'inside'"),
        ("gpus: 2", "gpus: 0", 3, "no whole number >= 1"),
        ("gpus: 2", "gpus: two", 3, "no whole number"),
        ("gpus: 2", "gpus: [1, 2, 3]", 3, "gpus lists 3 nodes, nodes says 2"),
        ("gpus: 2", "gpus: []", 3, "the list is empty"),
        ("gpus: 2\n", "", 1, "has no 'gpus'"),
        ("nodes: 2", "nodes: 2\nnodes: 3", 3, "'nodes' is there twice, first in line 2"),
        ("nodes: 2", "node: 2", 2, "no key 'node'; did you mean 'nodes'"),
        ("nodes: 2", "nodes: 2\nengine: {slices: 1 MiB}", 3, "no key 'slices'; did you mean"),
        ("nodes: 2", "nodes: 2\nengine: {slice: 64}", 3, "has no unit: write a size"),
        ("nodes: 2", "nodes: 2\nengine: {lanes: 0}", 3, "no whole number >= 1"),
        ("nodes: 2", "nodes: 2\ncombine: 1", 3, "has no unit"),
        ("{per: node}", "{per: rack}", 5, "is not like gpu, 2 gpus, node"),
        ("{per: node}", "{per: 0 gpus}", 5, "is not like gpu"),
        ("{per: node}", "{per: 2147483648 gpus}", 5, "is more than 2147483647"),
        ("{per: node}", "{per: 99999999999999999999 gpus}", 5, "is more than 2147483647"),
        ("{per: node}", "{per: node, rails: nic}", 5, "'nic' is no device above"),
        ("switch: {per: node}", "gpu: {per: node}", 5, "gpu is there already"),
        ("switch: {per: node}", "switch: 3", 5, "switch is no mapping"),
        ("name: small", "name: [", 2, "this is no YAML"),
        ("name: small", "- name", 1, "no YAML|no mapping"),
    ],
)  # fmt: skip
def test_bad_files_say_line_and_remedy(tmp_path, old, new, line, message):
    assert old in GOOD
    with pytest.raises(ConfigError, match=message) as caught:
        read(tmp_path, GOOD.replace(old, new, 1))
    assert f"t.yaml, line {line}: " in str(caught.value) or old == "name: small"


def test_too_large_and_too_deep(tmp_path):
    with pytest.raises(ConfigError, match=r"800000000 ranks are more than the 4194304 that can be"):
        simulate.load("dgx-h100", 100_000_000)
    with pytest.raises(ConfigError, match=r"t.yaml with 2 nodes: .* take fewer nodes"):
        read(tmp_path, GOOD.replace("gpus: 2", "gpus: 4000000"))
    with pytest.raises(ConfigError, match=r"t.yaml: .*too deep in each other"):
        read(tmp_path, "a: " + "[" * 5000 + "]" * 5000)


def test_links_in_a_circle(tmp_path):
    text = GOOD + (
        "  - {name: there, from: switch, to: fabric, bandwidth: 1 GB/s, latency: 1 us}\n"
        "  - {name: back, from: fabric, to: switch, bandwidth: 1 GB/s, latency: 1 us}\n"
    )
    with pytest.raises(
        ConfigError, match=r"line 1[01]: link \w+ closes the loop .*take one of them"
    ):
        read(tmp_path, text)


def test_nodes_that_nothing_joins(tmp_path):
    text = GOOD.replace("{per: all}", "{per: node}")
    with pytest.raises(
        TopologyError, match=r"line 9: no link joins rank 0 .* add the missing link"
    ):
        simulate.simulate("direct_two_shot", "all_reduce", 8, read(tmp_path, text))


def test_a_device_below_several(tmp_path):
    """A switch of the whole node cannot hang below one of two that a node has."""
    text = GOOD.replace("fabric: {per: all}", "half: {per: 1 gpu}").replace(
        "from: gpu, to: fabric", "from: switch, to: half"
    )
    with pytest.raises(ConfigError, match=r"line 9: link cable leads from one switch to several"):
        Network(read(tmp_path, text))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("{link: cable, node: 2, gpu: 0, slower: 2}", "on node 2, but the nodes are 0 to 1"),
        ("{link: cable, node: 0, gpu: 2, slower: 2}", "GPU 2 of node 0, whose GPUs are 0 to 1"),
        ("{link: cabel, node: 0, gpu: 0, slower: 2}", "did you mean 'cable'"),
        ("{link: cable, node: 0, gpu: 0}", "changes nothing"),
        ("{link: cable, node: 0, gpu: 0, slower: 0.5}", "not between 1 and"),
        ("{link: cable, node: 0, gpu: 0, late: 1 us}", "only a GPU enters late"),
        ("{node: 0, gpu: 0, broken: true}", "a GPU cannot be broken"),
        ("{node: 0, gpu: 0, broken: 1}", "neither true nor false"),
    ],
)
def test_bad_faults(tmp_path, fault, message):
    with pytest.raises(ConfigError, match=message) as caught:
        read(tmp_path, f"{GOOD}faults:\n  - {fault}\n")
    assert "line 11" in str(caught.value)


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        ("link: cable, node: 0, gpu: 0, slower: 2", "link: cable, node: 0, gpu: 2, slower: 2", ""),
        ("link: rail, node: 0, gpu: 1, slower: 2", "link: rail, node: 0, gpu: 2, slower: 2", ""),
        ("link: up, node: 0, gpu: 0, slower: 2", "link: up, node: 2, gpu: 0, slower: 2", ""),
        ("node: 0, gpu: 0, slower: 2", "node: 0, gpu: 0, late: 1 us", ""),
        (
            "link: cable, node: 0, gpu: 0, slower: 2",
            "link: cable, node: 0, gpu: 0, slower: 4",
            "line 17: line 16 is on that cable link already; say it once",
        ),
        # One NIC of two GPUs, one rail of two nodes.
        (
            "link: cable, node: 1, gpu: 2, slower: 2",
            "link: cable, node: 1, gpu: 3, broken: true",
            "on that cable link already",
        ),
        (
            "link: rail, node: 0, gpu: 0, slower: 2",
            "link: rail, node: 1, gpu: 1, slower: 2",
            "on that rail link already",
        ),
        (
            "link: up, node: 0, gpu: 0, slower: 2",
            "link: up, node: 1, gpu: 3, slower: 2",
            "on that up link already",
        ),
        (
            "node: 0, gpu: 0, slower: 2",
            "node: 0, gpu: 0, slower: 2",
            "line 17: line 16 is on that GPU already",
        ),
    ],
)
def test_a_link_has_one_fault(tmp_path, first, second, says):
    """Two on one link, which GPUs and nodes may share, are one of them too many."""
    text = f"""\
nodes: 4
gpus: 4
devices:
  nic: {{per: 2 gpus}}
  leaf: {{per: 2 nodes, rails: nic}}
  row: {{per: 2 nodes}}
  spine: {{per: all}}
  core: {{per: all}}
links:
  - {{name: cable, from: nic, to: leaf, bandwidth: 1 GB/s, latency: 1 us}}
  - {{name: rail, from: leaf, to: spine, bandwidth: 1 GB/s, latency: 1 us}}
  - {{name: pcie, from: gpu, to: nic, bandwidth: 1 GB/s, latency: 1 us}}
  - {{name: side, from: nic, to: row, bandwidth: 1 GB/s, latency: 1 us}}
  - {{name: up, from: row, to: core, bandwidth: 1 GB/s, latency: 1 us}}
faults:
  - {{{first}}}
  - {{{second}}}
"""
    if says:
        with pytest.raises(ConfigError, match=says):
            read(tmp_path, text)
    else:
        assert len(Network(read(tmp_path, text)).topology.faults) == 2


def test_files_that_are_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"unknown topology 'dgx-h10'.*did you mean 'dgx-h100'"):
        simulate.load("dgx-h10")
    with pytest.raises(ConfigError, match=r"none.yaml: it cannot be read: No such file"):
        simulate.load(str(tmp_path / "none.yaml"))
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9\n")
    with pytest.raises(ConfigError, match=r"latin.yaml: this is no text in UTF-8"):
        simulate.load(str(tmp_path / "latin.yaml"))
    with pytest.raises(ConfigError, match="line 1: the file is empty"):
        read(tmp_path, "")
    with pytest.raises(ConfigError, match="has no devices"):
        read(tmp_path, "gpus: 1\n")
    with pytest.raises(ConfigError, match="has no links"):
        read(tmp_path, "gpus: 1\ndevices: {}\n")
    with pytest.raises(ConfigError, match="links is no list"):
        read(tmp_path, "gpus: 1\ndevices: {}\nlinks: {}\n")


@pytest.mark.parametrize(
    ("text", "value"),
    [("450 GB/s", 450e9), ("400 Gb/s", 50e9), ("1.5e3 MB/s", 1.5e9), ("100Gbit/s", 12.5e9)],
)
def test_bandwidths(text, value):
    assert quantities.bandwidth(text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("parse", "text", "words"),
    [
        (quantities.duration, "-1 us", "is negative"),
        (quantities.duration, "1e12 s", "is longer than any call takes"),
        (quantities.amount, "0.1 B", "is less than a byte"),
        (quantities.amount, "1e30 B", "is more than can be"),
        (quantities.flops, "0 FLOP/s", "computes nothing"),
        (quantities.flops, "1e13 TFLOP/s", "is more than any GPU computes"),
    ],
)
def test_what_is_too_little_or_too_much_is_told_apart(parse, text, words):
    with pytest.raises(ValueError, match=words):
        parse(text)


def test_times_and_sizes():
    assert quantities.duration("300 ns") == pytest.approx(3e-7)
    assert quantities.duration("1 µs") == pytest.approx(1e-6)
    assert quantities.amount("512 KiB") == 512 * 1024
    assert quantities.amount("64 KB") == 64_000
    assert [quantities.seconds_text(s) for s in (2.5, 3.2e-3, 4e-6, 5e-8, 0.0099996)] == [
        "2.5 s", "3.2 ms", "4 us", "50 ns", "10 ms",
    ]  # fmt: skip
    near = (0.9996, 0.9996e-3, 0.9995e-3, 0.9996e-6, 999.6)
    assert [quantities.seconds_text(s) for s in near[:2]] == ["1 s", "1 ms"]
    assert [float(quantities.seconds_text(s).split()[0]) for s in near] == pytest.approx(
        [1, 1, 1, 1, 1000], rel=2e-3
    )
