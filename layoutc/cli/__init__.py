"""The command line: one module for each family of commands."""

from layoutc.cli.app import main as main
