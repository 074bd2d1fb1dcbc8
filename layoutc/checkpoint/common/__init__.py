"""What every kind of checkpoint needs: folders, ranks that agree, which part of a weight a rank holds."""
