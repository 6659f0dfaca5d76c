"""Reads and writes files on disks of this machine and in object stores."""
