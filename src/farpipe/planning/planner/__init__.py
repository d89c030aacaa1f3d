"""Find a good plan: layouts, placement, partition, the best order; one search for every workload and budget."""
