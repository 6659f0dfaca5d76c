"""Device meshes, checks of their arguments, and the process groups of a job."""
