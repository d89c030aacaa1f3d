"""One stage on several processes of a site: torch's meshes, FSDP2 and DTensor around a step of many microbatches."""
