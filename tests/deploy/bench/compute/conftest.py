from tests.gpu.fixtures import _library as _library
from tests.gpu.fixtures import software_gpu as software_gpu
