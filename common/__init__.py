"""Small shared utilities of the four scripts. Copy this folder with a script, or make one file by tools/onefile.py."""
