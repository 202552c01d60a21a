"""Small shared utilities of the four scripts: copy this folder with a script."""
