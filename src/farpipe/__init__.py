"""farpipe: plan, simulate and run the training of one large model over several datacenters."""

__version__ = "0.1.0"
