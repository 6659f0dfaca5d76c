"""Storages of files: disks of this machine and object stores."""
