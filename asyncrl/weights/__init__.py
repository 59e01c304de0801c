"""The weight path: snapshot, publisher, subscriber."""
