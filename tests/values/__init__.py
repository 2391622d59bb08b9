"""What every public function computes, on every backend."""
