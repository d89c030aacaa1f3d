"""A WAN on one machine: delays inside the transport, or network namespaces with links of the kernel between them."""

from farpipe.engine.links.links import EmulatedLinks, LinkShape, OwnPath
from farpipe.engine.links.namespace import Namespace
from farpipe.engine.links.wan import Wan, links_of_problem, wan_of_cluster

__all__ = ["EmulatedLinks", "LinkShape", "Namespace", "OwnPath", "Wan", "links_of_problem", "wan_of_cluster"]
