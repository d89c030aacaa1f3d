"""Several processes with the same stage: who they are, and how they sum."""
