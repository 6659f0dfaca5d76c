"""How bytes travel between the processes of a job: a module a way, behind one protocol."""
