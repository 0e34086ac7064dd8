"""What continuous integration runs besides Bazel."""
