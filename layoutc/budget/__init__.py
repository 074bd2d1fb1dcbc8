"""What a model costs each rank: resident bytes, bytes that a gather adds, bytes on the wire, and time. Pure."""
