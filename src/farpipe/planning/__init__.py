"""Finds a good plan for a job: stage costs, the search for an order, the planner over sites, degrees and replicas."""
