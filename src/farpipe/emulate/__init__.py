"""A WAN on one machine: delays inside the transport, or network namespaces with links of the kernel between them."""

from farpipe.emulate.links import EmulatedLinks, LinkShape, OwnPath, Passage
from farpipe.emulate.namespace import Namespace
from farpipe.emulate.wan import Wan, links_of_problem, wan_of_cluster

__all__ = ["EmulatedLinks", "LinkShape", "Namespace", "OwnPath", "Passage", "Wan", "links_of_problem", "wan_of_cluster"]
