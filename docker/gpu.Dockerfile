# hvd_gradcomp for NVIDIA GPUs: Horovod with NCCL, gloo and MPI, PyTorch and its examples.
#
#   docker build -f docker/gpu.Dockerfile -t hvd-gradcomp:gpu .
#   docker run --gpus all --rm hvd-gradcomp:gpu hvd-gradcomp doctor
#
# BUILD_IMAGE, BASE_IMAGE    CUDA with and without compiler; of the version that PyTorch's wheel has
# HOROVOD_GPU_OPERATIONS     NCCL, or empty for a build without CUDA
# HVD_GRADCOMP_CACHE         where the build finds and leaves Horovod's wheel
#
# No TensorFlow: Horovod 0.28.1's GPU operations call a function that it no longer has
# (stream_executor::gpu::AsGpuStreamValue).
ARG BUILD_IMAGE=nvidia/cuda:13.0.1-devel-ubuntu24.04
ARG BASE_IMAGE=nvidia/cuda:13.0.1-runtime-ubuntu24.04

FROM ${BUILD_IMAGE} AS build
ARG PIP_EXTRA_INDEX_URL
ARG HVD_GRADCOMP_CACHE=/var/cache/hvd_gradcomp
ARG HOROVOD_GPU_OPERATIONS=NCCL
ENV HOROVOD_WITHOUT_TENSORFLOW=1
WORKDIR /build
COPY docker/install-system.sh docker/
RUN docker/install-system.sh
COPY docker/frameworks.txt docker/constraints.txt docker/image.sh docker/
RUN docker/image.sh frameworks
COPY hvd_gradcomp/cli/build-horovod.sh hvd_gradcomp/cli/
RUN --mount=type=cache,target=/var/cache/hvd_gradcomp docker/image.sh horovod
COPY setup.py pyproject.toml README.md LICENSE ./
COPY hvd_gradcomp hvd_gradcomp
RUN docker/image.sh package

FROM ${BASE_IMAGE}
COPY docker/image.sh docker/cluster.sh /opt/hvd_gradcomp/
RUN /opt/hvd_gradcomp/image.sh system
COPY --from=build /opt/venv /opt/venv
COPY examples /home/horovod/examples
ENV PATH=/opt/venv/bin:/usr/local/nvidia/bin:/usr/local/cuda/bin:/usr/local/bin:/usr/bin:/bin
USER horovod
WORKDIR /home/horovod
EXPOSE 2222
HEALTHCHECK --interval=5m --timeout=2m --start-period=30s \
    CMD ["hvd-gradcomp", "doctor", "--no-self-test"]
ENTRYPOINT ["tini", "--", "/opt/hvd_gradcomp/cluster.sh"]
CMD ["worker"]
