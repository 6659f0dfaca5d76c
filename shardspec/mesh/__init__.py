"""Device meshes (device ids in a grid), and the process groups of a job."""
