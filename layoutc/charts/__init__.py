"""Charts, from the JSON that commands write: drawn again anywhere. They need matplotlib, of the extra `charts`."""
