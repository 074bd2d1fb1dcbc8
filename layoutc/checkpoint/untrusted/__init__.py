"""Files that are not trusted: read up to a limit, and checked before they are believed."""
