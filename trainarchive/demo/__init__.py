"""The main job on one machine: pretend nodes, real hooks, collectors, worker, archive, and a wiped node."""
