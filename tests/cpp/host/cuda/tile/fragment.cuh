// In place of src/cuda/tile/fragment.cuh for a test on the host: a softmax knows where scores lie, and loads none.
#pragma once
