"""What the doctor knows to be missing or wrong about a machine, with the texts of its findings.

Facts like those of preflight (`diagnosis.preflight.support`): the checks decide which of them apply.
"""

from __future__ import annotations

from gpucr.diagnosis.preflight.support.fact import Fact

# cuda driver
OLD_DRIVER = Fact(
    about="driver",
    severity="warning",
    what="this driver cannot restore to other GPUs",
    consequence="jobs come back on the GPUs that they had, or not at all",
    remedy="install NVIDIA driver 580 or newer",
)

# engine
OLD_CRIU = Fact(
    about="CRIU",
    severity="warning",
    what="CRIU {version} is too old for this kernel",
    consequence="it can dump no job with a TCP or UDP socket",
    remedy="use CRIU {least} or newer; `gpucr criu` fetches one where GPUCR_CRIU is not set",
)
CRIU_NOT_CHECKED = Fact(
    about="CRIU",
    severity="unknown",
    what="CRIU {version} starts; whether it works here was not seen",
    consequence="",
    remedy="sudo gpucr doctor",
)

CHROOT = Fact(
    about="CRIU",
    severity="warning",
    what="this is a chroot whose root folder is not a mount",
    consequence="a job can be dumped and restored in a sandbox only, as `gpucr run` makes one for root",
    remedy="mount the folder over itself before the chroot: `mount --rbind TREE TREE`",
)

# graphics
GPUS_NOT_LISTED = Fact(
    about="GPUs",
    severity="blocking",
    what="the GPUs cannot be listed",
    consequence="neither GPUs nor the memory that jobs hold on them can be seen",
    remedy="see what `nvidia-smi` says; the driver may need a reinstall or a reboot",
)
NO_GPU = Fact(
    about="GPUs",
    severity="warning",
    what="there is no GPU",
    consequence="snapshots with GPU state cannot be restored here",
    remedy="in a container, run it with the NVIDIA container runtime (`--gpus all`)",
)
NO_PERSISTENCE = Fact(
    about="GPUs",
    severity="warning",
    what="GPU {index}, {name}: persistence mode is off",
    consequence="the driver's restore needs it on, or a cuInit before it: gpucr calls that, which takes longer",
    remedy="nvidia-smi -i {index} -pm 1",
)
MPS = Fact(
    about="GPUs",
    severity="warning",
    what="GPUs may be shared through MPS",
    consequence="no driver is known to checkpoint a client of MPS: such jobs are refused",
    remedy="echo quit | nvidia-cuda-mps-control, when no client runs",
)

# kernel
OTHER_ARCHITECTURE = Fact(
    about="kernel",
    severity="warning",
    what="this is a {architecture} machine",
    consequence="gpucr was only tried on x86-64; staging is not captured here",
    remedy="use an x86-64 machine",
)
NO_CHECKPOINT_RESTORE = Fact(
    about="kernel",
    severity="blocking",
    what="Linux {release} was built without CONFIG_CHECKPOINT_RESTORE",
    consequence="CRIU cannot dump or restore; suspend and resume work",
    remedy="use a kernel of a distribution",
)
NO_SOCK_DIAG = Fact(
    about="kernel",
    severity="warning",
    what="the kernel does not list TCP sockets",
    consequence="jobs with network connections can be neither dumped nor restored",
    remedy="modprobe tcp_diag",
)
NO_TIME_NAMESPACES = Fact(
    about="kernel",
    severity="warning",
    what="there are no time namespaces",
    consequence="the clocks of restored jobs jump: timeouts end at once, or much too late",
    remedy="use a kernel with CONFIG_TIME_NS (Linux 5.6 and newer)",
)

# measured
NOT_MEASURED = Fact(
    about="probe",
    severity="unknown",
    what="nothing was measured on this machine yet",
    consequence="gpucr goes by rules on the safe side, and refuses jobs that might come back",
    remedy="gpucr doctor --probe",
)

# memory
HUGE_PAGES_NOT_SEEN = Fact(
    about="huge pages",
    severity="unknown",
    what="whether staging files can have huge pages was not seen",
    consequence="only root makes them; a suspend without root uses private memory",
    remedy="sudo gpucr doctor",
)
HUGETLB_RESERVED = Fact(
    about="huge pages",
    severity="warning",
    what="{size} of host memory are reserved for hugetlb pages and not used",
    consequence="gpucr uses transparent huge pages: it cannot have that memory",
    remedy="lower vm.nr_hugepages (sysctl) where no other program needs them",
)
LITTLE_MEMORY = Fact(
    about="host memory",
    severity="warning",
    what="{size} of host memory are available",
    consequence="jobs that hold more device memory than that are refused, and so are several that hold it together",
    remedy="end other programs, add memory, or suspend one job at a time",
)

# network
CONNECTIONS_KEPT = Fact(
    about="connections",
    severity="warning",
    what="{connections} of {snapshot} kept since {created}",
    consequence="the other ends get no answer until the snapshot is restored here",
    remedy="restore it; or `gpucr connections --close {name}`, and the other ends get a reset",
)
NO_PACKET_FILTER = Fact(
    about="connections",
    severity="warning",
    what="packets cannot be blocked while a job is saved",
    consequence="a packet that comes in the middle of a dump may break a TCP connection of the job; "
    "--tcp keep is refused",
    remedy="modprobe nf_tables, or install iptables",
)
NOT_BLOCKED_FOR_USERS = Fact(
    about="connections",
    severity="warning",
    what="packets are not blocked while this user's jobs are saved",
    consequence="a packet from outside in the middle of a dump may break that connection of the job; those between its "
    "own processes stand still",
    remedy="let root dump a job whose connections to other machines must survive",
)
PACKET_FILTER_NOT_SEEN = Fact(
    about="connections",
    severity="unknown",
    what="whether packets can be blocked was not seen",
    consequence="",
    remedy="sudo gpucr doctor",
)

# privileges
ROOT_WITHOUT_CAPABILITIES = Fact(
    about="privileges",
    severity="blocking",
    what="this is root, without the capabilities that CRIU needs",
    consequence="dump and restore are refused",
    remedy="give the container {missing} (`--cap-add`), or run gpucr outside it",
    code="GPUCR-NOT-PERMITTED",
)
USER_WITHOUT_HELPER = Fact(
    about="privileges",
    severity="warning",
    what="this user can only suspend and resume its own jobs",
    consequence="dump and restore are refused, and other users' jobs are out of reach",
    remedy="sudo gpucr helper install lets ordinary users dump and restore their own jobs; sudo gpucr doctor shows "
    "what root can do",
)
IN_USER_NAMESPACE = Fact(
    about="privileges",
    severity="warning",
    what="gpucr runs in a user namespace",
    consequence="its capabilities hold inside only; CRIU usually cannot work with that, as in rootless containers",
    remedy="run gpucr on the host, outside rootless containers",
)
YAMA_RESTRICTS = Fact(
    about="ptrace",
    severity="warning",
    what="this user cannot trace processes that it did not start itself",
    consequence="suspend takes the driver's plain way, which is slower; freeze, dump and restore are refused, but for "
    "CUDA processes that `gpucr run` has started, which give their leave where it is 1",
    remedy="run gpucr as root; sysctl kernel.yama.ptrace_scope=0 would do too, and lets every program of a user look"
    " into the others",
)
YAMA_FORBIDS = Fact(
    about="ptrace",
    severity="blocking",
    what="nobody can trace any process",
    consequence="CRIU cannot dump; suspend takes the driver's plain way, which is slower",
    remedy="it can be lowered only by a reboot: remove kernel.yama.ptrace_scope=3 from /etc/sysctl.d",
)
NO_SECCOMP = Fact(
    about="seccomp",
    severity="warning",
    what="this kernel has no system call filters",
    consequence="`gpucr run` cannot keep a job from io_uring, which CRIU cannot dump",
    remedy="use a kernel with CONFIG_SECCOMP_FILTER; for torch's TCPStore set USE_LIBUV=0",
)
UNDER_SECCOMP = Fact(
    about="seccomp",
    severity="warning",
    what="gpucr itself runs under a system call filter",
    consequence="the kernel then lets it suspend no filter of a job: a dump of a job that has one too fails, and a "
    "suspend takes the plain way",
    remedy="run gpucr outside the container, or the container with `--security-opt seccomp=unconfined`, which lowers"
    " its security",
)

# runtimes
CRUN_ON_HYBRID_CGROUPS = Fact(
    about="containers",
    severity="warning",
    what="crun cannot checkpoint containers here",
    consequence="it checkpoints only where it sees cgroups of version 2 alone",
    remedy="boot with systemd.unified_cgroup_hierarchy=1, or use runc",
)

# storage
PLACE_IN_MEMORY = Fact(
    about="disk",
    severity="warning",
    what="{folder} is in memory",
    consequence="snapshots there do not survive a reboot, and a dump needs host memory for device memory twice",
    remedy="name a folder on a disk with --to",
)
THROUGH_PAGE_CACHE = Fact(
    about="disk",
    severity="warning",
    what="files in {folder} go through the page cache",
    consequence="dumps and restores take longer, and take memory from other programs meanwhile",
    remedy="name a folder on another file system with --to, such as ext4 or xfs",
)

# those with several cases
NO_DRIVER = Fact(
    about="driver",
    severity="blocking",
    what="{problem}",
    consequence="jobs with CUDA cannot be worked on; jobs without can be dumped and restored",
    remedy="{hint}",
)
NO_CRIU = Fact(
    about="CRIU",
    severity="blocking",
    what="there is no CRIU that can be used",
    consequence="dump and restore are refused; suspend and resume work",
    remedy="gpucr criu fetches one on Debian and Ubuntu; elsewhere install CRIU {least} or newer",
    code="GPUCR-NO-CRIU",
    repair="fetch-criu",
)
NO_CRIU_FOR_USERS = Fact(
    about="CRIU",
    severity="warning",
    what="there is no CRIU that can be used",
    consequence="dump and restore are refused; suspend and resume work",
    remedy="sudo gpucr helper install fetches one, and lets ordinary users have their jobs dumped with it",
    code="GPUCR-NO-CRIU",
)
CRIU_FAILS = Fact(
    about="CRIU",
    severity="blocking",
    what="{problem}",
    consequence="dump and restore fail",
    remedy="{hint}",
)
MIG = Fact(
    about="GPUs",
    severity="blocking",
    what="GPU {index}, {name}: it is partitioned (MIG)",
    consequence="no driver is known to checkpoint or restore on a MIG GPU: jobs on it are refused",
    remedy="nvidia-smi -i {index} -mig 0, when nothing runs on it",
    code="GPUCR-MIG",
)
NO_SANDBOXES = Fact(
    about="kernel",
    severity="warning",
    what="there can be no sandboxes: no new {absent} namespaces",
    consequence="`gpucr run` starts jobs with the machine's own pids and ports, which must be free at a restore",
    remedy="use a kernel with CONFIG_PID_NS, CONFIG_NET_NS and CONFIG_IPC_NS",
)
SANDBOXES_FORBIDDEN = Fact(
    about="kernel",
    severity="warning",
    what="there can be no sandboxes: no new {absent} namespaces",
    consequence="`gpucr run` starts jobs with the machine's own pids and ports, which must be free at a restore",
    remedy="raise that limit with sysctl",
)
NO_HUGE_STAGING = Fact(
    about="huge pages",
    severity="warning",
    what="staging files have no huge pages",
    consequence="dump and restore take longer; a suspend takes private memory instead",
    remedy="use a kernel with CONFIG_TRANSPARENT_HUGEPAGE, in a container let it mount a tmpfs (CAP_SYS_ADMIN)",
)
HUGE_STAGING_DENIED = Fact(
    about="huge pages",
    severity="warning",
    what="staging files have no huge pages",
    consequence="dump and restore take longer; a suspend takes private memory instead",
    remedy="echo never > {policy} (the kernel's default, under which gpucr's own files still have them)",
    repair="huge-pages-shared",
)
NO_HUGE_PAGES = Fact(
    about="huge pages",
    severity="warning",
    what="private memory has no huge pages",
    consequence="a suspend without root takes longer",
    remedy="use a kernel with CONFIG_TRANSPARENT_HUGEPAGE",
)
HUGE_PAGES_OFF = Fact(
    about="huge pages",
    severity="warning",
    what="private memory has no huge pages",
    consequence="a suspend without root takes longer",
    remedy="echo madvise > {policy}: only programs that ask for them get them",
    repair="huge-pages-private",
)
CGROUP_LIMIT = Fact(
    about="cgroups",
    severity="warning",
    what="a cgroup has {size} of its host memory left",
    consequence="jobs that hold more device memory than that are refused: the kernel would {act} "
    "processes of the cgroup",
    remedy="raise {limit}, in a container its memory limit",
)
FILTER_LEFT = Fact(
    about="connections",
    severity="warning",
    what="left behind: {what}",
    consequence="packets of a job's connections are dropped, also when that job has ended",
    remedy="{remedy}",
)
HOOK_NOT_SEEN = Fact(
    about="containers",
    severity="unknown",
    what="whether the hook is installed was not seen",
    consequence="",
    remedy="sudo gpucr doctor",
)
HOOK_UNREADABLE = Fact(
    about="containers",
    severity="warning",
    what="whether the hook is installed was not seen",
    consequence="CRIU may not be able to read it either, and then no container can be checkpointed",
    remedy="fix that file, then run gpucr hook install, as root",
)
HOOK_OF_ANOTHER = Fact(
    about="containers",
    severity="warning",
    what="the hook is of another gpucr, or its script is missing",
    consequence="when a runtime checkpoints a container that uses a GPU, CRIU fails, or works with another gpucr",
    remedy="gpucr hook install, as root",
)
NO_HOOK = Fact(
    about="containers",
    severity="warning",
    what="the hook is not installed",
    consequence="runtimes checkpoint containers that use GPUs only with CRIU's own CUDA plugin, or not at all",
    remedy="gpucr hook install, as root",
)
NOT_WRITABLE = Fact(
    about="disk",
    severity="blocking",
    what="no snapshot can be written to {folder}",
    consequence="a dump to it is refused",
    remedy="name another folder with --to, or change its owner or mode",
)
LITTLE_DISK = Fact(
    about="disk",
    severity="warning",
    what="{folder} has {size} free",
    consequence="jobs that hold more device memory than that cannot be dumped there",
    remedy="free some space, or name a folder on another disk with --to",
)
NO_SYS_TIME = Fact(
    about="privileges",
    severity="blocking",
    what="CAP_SYS_TIME is missing",
    consequence="restore is refused: CRIU gives up where it may not set a job's clocks",
    remedy="give the container CAP_SYS_TIME (`--cap-add`), or run gpucr outside it",
)
NO_SYS_RESOURCE = Fact(
    about="privileges",
    severity="warning",
    what="CAP_SYS_RESOURCE is missing",
    consequence="CRIU cannot dump processes of another user than its own; and when memory runs out, the kernel may "
    "kill CRIU or gpucr's guard in the middle of a dump, which can cost the job processes",
    remedy="give the container CAP_SYS_RESOURCE (`--cap-add`), or run gpucr outside it",
)
NO_NET_ADMIN = Fact(
    about="privileges",
    severity="warning",
    what="CAP_NET_ADMIN is missing",
    consequence="CRIU cannot dump a job with a TCP connection: it may not silence it",
    remedy="give the container CAP_NET_ADMIN (`--cap-add`), or run gpucr outside it",
)
NO_NET_RAW = Fact(
    about="privileges",
    severity="warning",
    what="CAP_NET_RAW is missing",
    consequence="CRIU cannot restore a job with a TCP connection that its other end had closed: "
    "it may not send the end",
    remedy="give the container CAP_NET_RAW (`--cap-add`), or run gpucr outside it",
)
