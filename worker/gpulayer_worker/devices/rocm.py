"""AMD devices by the kernel's own files (KFD), which need neither a tool nor a runtime to be started.

The order is KFD's, which is the order that the ROCm runtime and its masks count in. Names come from amd-smi or
rocm-smi where one is installed, else from the architecture. Nothing here initialises HIP: a process that did so before
the mask is set would put every rank on the first GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpulayer_worker.devices.facts import Device, Process, Reading, Report
from gpulayer_worker.devices.recorded import Machine

KFD = "/sys/class/kfd/kfd"
NODES = f"{KFD}/topology/nodes"
LOCAL_MEMORY = (1, 2)  # heap types of a GPU's own memory


@dataclass(frozen=True)
class Node:
    """One GPU of the topology: its number there, its id, its properties."""

    number: str
    gpu_id: int
    facts: dict[str, int]

    @property
    def pci(self) -> str:
        place = self.facts.get("location_id", 0)
        domain, bus, slot = self.facts.get("domain", 0), place >> 8 & 0xFF, place >> 3 & 0x1F
        return f"{domain:04x}:{bus:02x}:{slot:02x}.{place & 7}"

    @property
    def uuid(self) -> str:
        unique = self.facts.get("unique_id", 0)
        return f"GPU-{unique:016x}" if unique else f"pci-{self.pci}"

    @property
    def architecture(self) -> str:
        version = self.facts.get("gfx_target_version", 0)
        return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


class Rocm:
    """The AMD devices of a machine."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._nodes: dict[str, Node] = {}
        self._unified: set[str] = set()

    def report(self) -> Report:
        nodes = [node for node in map(self._node, self.machine.names(NODES)) if node]
        self._nodes = {node.uuid: node for node in nodes}
        if not nodes:
            return Report()
        names = product_names(self.machine)
        devices = tuple(self._device(index, node, names) for index, node in enumerate(nodes))
        version = self.machine.text("/sys/module/amdgpu/version")
        return Report(devices, self.readings(), (("amdgpu", version),) if version else ())

    def _node(self, number: str) -> Node | None:
        """A node that computes; the others are processors."""
        facts = _properties(self.machine.text(f"{NODES}/{number}/properties"))
        gpu_id = self.machine.number(f"{NODES}/{number}/gpu_id") or 0
        if not facts.get("simd_count") or not gpu_id:
            return None
        return Node(number, gpu_id, facts)

    def _device(self, index: int, node: Node, names: dict[str, str]) -> Device:
        own_bytes = self._memory_bytes(node)
        # An APU shares the machine's memory, whatever the firmware carved out of it.
        unified = not own_bytes or bool(node.facts.get("cpu_cores_count"))
        if unified:
            self._unified.add(node.uuid)
        memory_bytes = self.machine.memory_bytes() if unified else own_bytes
        name = names.get(node.pci) or f"AMD GPU {node.architecture}"
        return Device(index, "rocm", name, node.uuid, node.pci, memory_bytes, unified)

    def _memory_bytes(self, node: Node) -> int:
        banks = f"{NODES}/{node.number}/mem_banks"
        facts = [_properties(self.machine.text(f"{banks}/{n}/properties")) for n in self.machine.names(banks)]
        return sum(bank.get("size_in_bytes", 0) for bank in facts if bank.get("heap_type") in LOCAL_MEMORY)

    def readings(self) -> tuple[Reading, ...]:
        processes = self._processes()
        return tuple(self._reading(node, processes.get(node.gpu_id, ())) for node in self._nodes.values())

    def _reading(self, node: Node, processes: tuple[Process, ...]) -> Reading:
        folder = f"/sys/class/drm/renderD{node.facts.get('drm_render_minor', 0)}/device"
        utilisation = self.machine.number(f"{folder}/gpu_busy_percent")
        if node.uuid in self._unified:
            return Reading(node.uuid, None, self.machine.available_bytes(), utilisation, processes)
        total = self.machine.number(f"{folder}/mem_info_vram_total")
        used = self.machine.number(f"{folder}/mem_info_vram_used")
        free = None if total is None or used is None else total - used
        return Reading(node.uuid, used, free, utilisation, processes)

    def _processes(self) -> dict[int, tuple[Process, ...]]:
        """By the id of the GPU: who holds how much of it."""
        found: dict[int, tuple[Process, ...]] = {}
        for pid in filter(str.isdigit, self.machine.names(f"{KFD}/proc")):
            name = self.machine.text(f"/proc/{pid}/comm") or "unknown"
            for node in self._nodes.values():
                size = self.machine.number(f"{KFD}/proc/{pid}/vram_{node.gpu_id}")
                if size:
                    entry = Process(int(pid), name, size)
                    found[node.gpu_id] = (*found.get(node.gpu_id, ()), entry)
        return found


def product_names(machine: Machine) -> dict[str, str]:
    """PCI address → the name that a card is sold under, by whichever tool is installed."""
    listed = machine.document("amd-smi", "static", "--asic", "--bus", "--json")
    if isinstance(listed, dict):
        listed = listed.get("gpu_data")
    if isinstance(listed, list):
        return dict(pair for pair in map(_named_by_amd_smi, listed) if pair)
    cards = machine.document("rocm-smi", "--showproductname", "--showbus", "--json")
    return _named_by_rocm_smi(cards) if isinstance(cards, dict) else {}


def _named_by_amd_smi(entry: Any) -> tuple[str, str] | None:
    try:
        name, address = str(entry["asic"]["market_name"]), str(entry["bus"]["bdf"]).lower()
    except (KeyError, TypeError):
        return None
    return (address, name) if name not in ("", "N/A") else None


def _named_by_rocm_smi(cards: dict[str, Any]) -> dict[str, str]:
    found = {}
    for facts in cards.values():
        if isinstance(facts, dict):
            folded = {str(key).casefold(): str(value) for key, value in facts.items()}
            name, address = folded.get("card series", ""), folded.get("pci bus", "").lower()
            if name and address and not name.startswith("0x"):
                found[address] = name
    return found


def _properties(text: str | None) -> dict[str, int]:
    pairs = (line.split() for line in (text or "").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
