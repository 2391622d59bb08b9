	.file	"s.cpp"
	.text
	.p2align 4
	.globl	_Z1fPKN1t7ElementINS_4bf16EEEPS2_ld
	.type	_Z1fPKN1t7ElementINS_4bf16EEEPS2_ld, @function
_Z1fPKN1t7ElementINS_4bf16EEEPS2_ld:
.LFB28:
	.cfi_startproc
	testq	%rdx, %rdx
	jle	.L27
	leaq	-1(%rdx), %rax
	movq	%rsi, %r8
	vmovsd	%xmm0, %xmm0, %xmm9
	movq	%rdx, %rcx
	cmpq	$30, %rax
	jbe	.L17
	movl	$1, %esi
	shrq	$5, %rdx
	xorl	%eax, %eax
	vbroadcastsd	.LC4(%rip), %zmm10
	vpbroadcastq	%rsi, %zmm6
	vbroadcastsd	%xmm0, %zmm11
	movabsq	$17592186044415, %rsi
	vbroadcastsd	.LC6(%rip), %zmm8
	vpbroadcastq	%rsi, %zmm5
	salq	$6, %rdx
	movabsq	$-35184372088832, %rsi
	vbroadcastsd	.LC10(%rip), %zmm7
	vmovdqa64	.LC11(%rip), %zmm14
	vpbroadcastq	%rsi, %zmm4
	movabsq	$-9223372036854775808, %rsi
	vpbroadcastq	%rsi, %zmm3
	subq	$1, %rsi
	vpbroadcastq	%rsi, %zmm2
	movl	$64, %esi
	vpbroadcastw	%esi, %zmm15
	movl	$32767, %esi
	vpbroadcastd	%esi, %zmm13
	movl	$1, %esi
	vpbroadcastd	%esi, %zmm12
	.p2align 4,,10
	.p2align 3
.L4:
	vpmovzxwd	(%rdi,%rax), %zmm18
	vmovdqu16	(%rdi,%rax), %zmm1
	vpslld	$16, %zmm18, %zmm18
	vextracti64x4	$0x1, %zmm1, %ymm0
	vcvtps2pd	%ymm18, %zmm19
	vextractf32x8	$0x1, %zmm18, %ymm18
	vpmovzxwd	%ymm0, %zmm0
	vcvtps2pd	%ymm18, %zmm18
	vmulpd	%zmm11, %zmm18, %zmm18
	vpslld	$16, %zmm0, %zmm0
	vcvtps2pd	%ymm0, %zmm16
	vextractf32x8	$0x1, %zmm0, %ymm0
	vmulpd	%zmm11, %zmm16, %zmm16
	vcvtps2pd	%ymm0, %zmm0
	vmulpd	%zmm11, %zmm0, %zmm0
	vmulpd	%zmm11, %zmm19, %zmm19
	vpsrlq	$45, %zmm18, %zmm1
	vpaddq	%zmm18, %zmm5, %zmm17
	vmovdqa64	%zmm18, %zmm21
	vpandq	%zmm6, %zmm1, %zmm1
	vpaddq	%zmm17, %zmm1, %zmm23
	vpsrlq	$45, %zmm16, %zmm1
	vpaddq	%zmm16, %zmm5, %zmm17
	vpandq	%zmm6, %zmm1, %zmm1
	vpsrlq	$45, %zmm0, %zmm20
	vpaddq	%zmm17, %zmm1, %zmm22
	vpandq	%zmm6, %zmm20, %zmm20
	vpaddq	%zmm0, %zmm5, %zmm1
	vpaddq	%zmm1, %zmm20, %zmm20
	vcmppd	$0, %zmm19, %zmm19, %k1
	vpaddq	%zmm19, %zmm5, %zmm17
	vpsrlq	$45, %zmm19, %zmm1
	vpandq	%zmm6, %zmm1, %zmm1
	vpaddq	%zmm17, %zmm1, %zmm1
	vmovdqa64	%zmm19, %zmm17
	vpandq	%zmm4, %zmm1, %zmm17{%k1}
	vcmppd	$0, %zmm18, %zmm18, %k1
	vmovdqa64	%zmm16, %zmm1
	vpandq	%zmm4, %zmm23, %zmm21{%k1}
	vcmppd	$0, %zmm16, %zmm16, %k1
	vmovdqa64	%zmm0, %zmm23
	vcvtpd2ps	%zmm21, %ymm21
	vpandq	%zmm4, %zmm22, %zmm1{%k1}
	vcmppd	$0, %zmm0, %zmm0, %k1
	vaddpd	%zmm10, %zmm0, %zmm22
	vcvtpd2ps	%zmm1, %ymm1
	vpandq	%zmm4, %zmm20, %zmm23{%k1}
	vaddpd	%zmm10, %zmm16, %zmm20
	vaddpd	%zmm8, %zmm22, %zmm22
	vcvtpd2ps	%zmm23, %ymm23
	vinsertf32x8	$0x1, %ymm23, %zmm1, %zmm1
	vaddpd	%zmm8, %zmm20, %zmm20
	vpternlogq	$248, %zmm3, %zmm0, %zmm22
	vcvtpd2ps	%zmm22, %ymm22
	vpternlogq	$248, %zmm3, %zmm16, %zmm20
	vpandq	%zmm16, %zmm2, %zmm16
	vcmppd	$1, %zmm7, %zmm16, %k0
	vpandq	%zmm0, %zmm2, %zmm16
	vpandq	%zmm19, %zmm2, %zmm0
	vcvtpd2ps	%zmm20, %ymm20
	vcmppd	$1, %zmm7, %zmm16, %k1
	vaddpd	%zmm10, %zmm19, %zmm16
	vinsertf32x8	$0x1, %ymm22, %zmm20, %zmm20
	kunpckbw	%k0, %k1, %k1
	vaddpd	%zmm8, %zmm16, %zmm16
	vmovaps	%zmm20, %zmm1{%k1}
	vcmppd	$1, %zmm7, %zmm0, %k0
	vpandq	%zmm18, %zmm2, %zmm0
	vcmppd	$1, %zmm7, %zmm0, %k2
	vaddpd	%zmm10, %zmm18, %zmm0
	vpternlogq	$248, %zmm3, %zmm19, %zmm16
	vcmpps	$4, %zmm1, %zmm1, %k1
	vcvtpd2ps	%zmm16, %ymm16
	vaddpd	%zmm8, %zmm0, %zmm0
	kunpckbw	%k0, %k2, %k2
	vpternlogq	$248, %zmm3, %zmm18, %zmm0
	vcvtpd2ps	%zmm0, %ymm0
	vinsertf32x8	$0x1, %ymm0, %zmm16, %zmm16
	vcvtpd2ps	%zmm17, %ymm0
	vinsertf32x8	$0x1, %ymm21, %zmm0, %zmm0
	vmovaps	%zmm16, %zmm0{%k2}
	vpsrld	$16, %zmm1, %zmm16
	vpaddd	%zmm1, %zmm13, %zmm1
	vcmpps	$4, %zmm0, %zmm0, %k0
	vpsrld	$16, %zmm0, %zmm17
	vpaddd	%zmm0, %zmm13, %zmm0
	vmovdqa64	%zmm17, %zmm18
	vpandd	%zmm12, %zmm17, %zmm17
	vpermt2w	%zmm16, %zmm14, %zmm18
	vpandd	%zmm12, %zmm16, %zmm16
	vpaddd	%zmm17, %zmm0, %zmm0
	kunpckwd	%k0, %k1, %k1
	vpaddd	%zmm16, %zmm1, %zmm1
	vpsrld	$16, %zmm0, %zmm0
	vporq	%zmm15, %zmm18, %zmm18
	vpsrld	$16, %zmm1, %zmm1
	vpermt2w	%zmm1, %zmm14, %zmm0
	vmovdqu16	%zmm18, %zmm0{%k1}
	vmovdqu16	%zmm0, (%r8,%rax)
	addq	$64, %rax
	cmpq	%rdx, %rax
	jne	.L4
	movq	%rcx, %rdx
	andq	$-32, %rdx
	movq	%rdx, %rsi
	cmpq	%rdx, %rcx
	je	.L24
.L3:
	movq	%rcx, %r9
	subq	%rsi, %r9
	leaq	-1(%r9), %rax
	cmpq	$14, %rax
	jbe	.L6
	vmovdqu16	(%rdi,%rsi,2), %ymm5
	vbroadcastsd	%xmm9, %ymm1
	movl	$1, %eax
	vpmovzxwd	(%rdi,%rsi,2), %ymm3
	vbroadcastsd	.LC6(%rip), %ymm12
	vpbroadcastq	%rax, %ymm4
	movabsq	$17592186044415, %rax
	vpslld	$16, %ymm3, %ymm3
	vextracti128	$0x1, %ymm5, %xmm0
	vpmovzxwd	%xmm0, %ymm0
	vcvtps2pd	%xmm3, %ymm5
	vextractf128	$0x1, %ymm3, %xmm3
	vpslld	$16, %ymm0, %ymm0
	vcvtps2pd	%xmm3, %ymm3
	vmulpd	%ymm1, %ymm3, %ymm3
	vcvtps2pd	%xmm0, %ymm2
	vextractf128	$0x1, %ymm0, %xmm0
	vmulpd	%ymm1, %ymm2, %ymm2
	vcvtps2pd	%xmm0, %ymm0
	vmulpd	%ymm1, %ymm0, %ymm0
	vmulpd	%ymm1, %ymm5, %ymm5
	vpbroadcastq	%rax, %ymm1
	movabsq	$-35184372088832, %rax
	vpsrlq	$45, %ymm3, %ymm10
	vpaddq	%ymm3, %ymm1, %ymm6
	vpand	%ymm4, %ymm10, %ymm10
	vpsrlq	$45, %ymm2, %ymm7
	vpaddq	%ymm6, %ymm10, %ymm10
	vpand	%ymm4, %ymm7, %ymm7
	vpaddq	%ymm2, %ymm1, %ymm6
	vpaddq	%ymm6, %ymm7, %ymm7
	vpsrlq	$45, %ymm0, %ymm6
	vpaddq	%ymm0, %ymm1, %ymm8
	vpand	%ymm4, %ymm6, %ymm6
	vcmppd	$0, %ymm5, %ymm5, %k1
	vpaddq	%ymm5, %ymm1, %ymm1
	vpaddq	%ymm8, %ymm6, %ymm6
	vpsrlq	$45, %ymm5, %ymm8
	vmovdqa	%ymm0, %ymm13
	vpand	%ymm4, %ymm8, %ymm8
	vmovdqa	%ymm5, %ymm4
	vpaddq	%ymm1, %ymm8, %ymm8
	vpbroadcastq	%rax, %ymm1
	movabsq	$-9223372036854775808, %rax
	vpandq	%ymm1, %ymm8, %ymm4{%k1}
	vcmppd	$0, %ymm3, %ymm3, %k1
	vmovdqa	%ymm3, %ymm8
	vpbroadcastq	%rax, %ymm11
	subq	$1, %rax
	vpandq	%ymm1, %ymm10, %ymm8{%k1}
	vcmppd	$0, %ymm2, %ymm2, %k1
	vmovdqa	%ymm2, %ymm10
	vcvtpd2psy	%ymm8, %xmm8
	vpandq	%ymm1, %ymm7, %ymm10{%k1}
	vcmppd	$0, %ymm0, %ymm0, %k1
	vcvtpd2psy	%ymm10, %xmm10
	vpandq	%ymm1, %ymm6, %ymm13{%k1}
	vbroadcastsd	.LC4(%rip), %ymm1
	vaddpd	%ymm1, %ymm2, %ymm7
	vaddpd	%ymm1, %ymm0, %ymm6
	vaddpd	%ymm12, %ymm7, %ymm7
	vaddpd	%ymm12, %ymm6, %ymm6
	vpternlogq	$248, %ymm11, %ymm2, %ymm7
	vpternlogq	$248, %ymm11, %ymm0, %ymm6
	vcvtpd2psy	%ymm6, %xmm6
	vcvtpd2psy	%ymm7, %xmm7
	vinsertf128	$0x1, %xmm6, %ymm7, %ymm7
	vcvtpd2psy	%ymm13, %xmm6
	vbroadcastsd	.LC10(%rip), %ymm13
	vinsertf128	$0x1, %xmm6, %ymm10, %ymm10
	vpbroadcastq	%rax, %ymm6
	movl	$15, %eax
	vpand	%ymm2, %ymm6, %ymm2
	kmovb	%eax, %k3
	movl	$64, %eax
	vcmppd	$1, %ymm13, %ymm2, %k1
	vpand	%ymm0, %ymm6, %ymm2
	vpand	%ymm5, %ymm6, %ymm0
	vcmppd	$1, %ymm13, %ymm0, %k2
	vaddpd	%ymm1, %ymm5, %ymm0
	vaddpd	%ymm1, %ymm3, %ymm1
	vcmppd	$1, %ymm13, %ymm2, %k0
	vpand	%ymm3, %ymm6, %ymm6
	vmovdqa	.LC23(%rip), %ymm2
	kandb	%k3, %k1, %k1
	vaddpd	%ymm12, %ymm0, %ymm0
	vaddpd	%ymm12, %ymm1, %ymm1
	kandb	%k3, %k2, %k2
	kshiftlb	$4, %k0, %k0
	korb	%k0, %k1, %k1
	vcmppd	$1, %ymm13, %ymm6, %k0
	vpternlogq	$248, %ymm11, %ymm5, %ymm0
	vpternlogq	$248, %ymm11, %ymm3, %ymm1
	vblendmps	%ymm7, %ymm10, %ymm3{%k1}
	vcvtpd2psy	%ymm0, %xmm0
	vcvtpd2psy	%ymm1, %xmm1
	vinsertf128	$0x1, %xmm1, %ymm0, %ymm1
	vcvtpd2psy	%ymm4, %xmm0
	vinsertf128	$0x1, %xmm8, %ymm0, %ymm0
	kshiftlb	$4, %k0, %k0
	korb	%k0, %k2, %k2
	vpsrld	$16, %ymm3, %ymm4
	vmovaps	%ymm1, %ymm0{%k2}
	vpbroadcastw	%eax, %ymm1
	movl	$32767, %eax
	vpsrld	$16, %ymm0, %ymm6
	vcmpps	$4, %ymm0, %ymm0, %k0
	vmovdqa	%ymm6, %ymm7
	vcmpps	$4, %ymm3, %ymm3, %k1
	vpermt2w	%ymm4, %ymm2, %ymm7
	vpor	%ymm1, %ymm7, %ymm7
	vpbroadcastd	%eax, %ymm1
	movl	$1, %eax
	vpbroadcastd	%eax, %ymm5
	vpaddd	%ymm0, %ymm1, %ymm0
	vpaddd	%ymm3, %ymm1, %ymm1
	movq	%r9, %rax
	vpand	%ymm5, %ymm6, %ymm6
	vpand	%ymm5, %ymm4, %ymm4
	andq	$-16, %rax
	kunpckbw	%k0, %k1, %k1
	vpaddd	%ymm6, %ymm0, %ymm0
	vpaddd	%ymm4, %ymm1, %ymm1
	addq	%rax, %rdx
	andl	$15, %r9d
	vpsrld	$16, %ymm0, %ymm0
	vpsrld	$16, %ymm1, %ymm1
	vpermi2w	%ymm1, %ymm0, %ymm2
	vmovdqu16	%ymm7, %ymm2{%k1}
	vmovdqu16	%ymm2, (%r8,%rsi,2)
	je	.L24
.L6:
	vmovsd	.LC10(%rip), %xmm1
	pushq	%rbp
	.cfi_def_cfa_offset 16
	.cfi_offset 6, -16
	movabsq	$9223372036854775807, %rsi
	vmovsd	.LC4(%rip), %xmm2
	movq	%rsp, %rbp
	.cfi_def_cfa_register 6
	pushq	%r13
	.cfi_offset 13, -24
	movabsq	$17592186044415, %r13
	pushq	%r12
	.cfi_offset 12, -32
	movabsq	$-35184372088832, %r12
	pushq	%rbx
	.cfi_offset 3, -40
	movabsq	$-9223372036854775808, %rbx
	.p2align 4,,10
	.p2align 3
.L10:
	movzwl	(%rdi,%rdx,2), %eax
	sall	$16, %eax
	vmovd	%eax, %xmm4
	vcvtss2sd	%xmm4, %xmm4, %xmm0
	vmulsd	%xmm9, %xmm0, %xmm0
	vmovq	%xmm0, %r9
	movq	%r9, %rax
	andq	%rsi, %rax
	vucomisd	%xmm0, %xmm0
	movq	%rax, %r10
	vmovq	%xmm0, %rax
	jp	.L9
	shrq	$45, %rax
	leaq	(%r9,%r13), %r11
	andl	$1, %eax
	addq	%r11, %rax
	andq	%r12, %rax
.L9:
	vmovq	%r10, %xmm5
	vcomisd	%xmm5, %xmm1
	jbe	.L31
	vaddsd	%xmm2, %xmm0, %xmm0
	movq	%r9, %rax
	andq	%rbx, %rax
	vsubsd	%xmm2, %xmm0, %xmm0
	vmovq	%xmm0, %r11
	orq	%r11, %rax
	vmovq	%rax, %xmm3
	vcvtsd2ss	%xmm3, %xmm3, %xmm0
.L14:
	vmovd	%xmm0, %r9d
	movl	%r9d, %eax
	shrl	$16, %eax
	vucomiss	%xmm0, %xmm0
	jnp	.L32
	orl	$64, %eax
	movw	%ax, (%r8,%rdx,2)
	addq	$1, %rdx
	cmpq	%rdx, %rcx
	jg	.L10
	vzeroupper
	popq	%rbx
	popq	%r12
	popq	%r13
	popq	%rbp
	.cfi_remember_state
	.cfi_def_cfa 7, 8
	ret
	.p2align 4,,10
	.p2align 3
.L32:
	.cfi_restore_state
	andl	$1, %eax
	leal	32767(%r9,%rax), %eax
	shrl	$16, %eax
	movw	%ax, (%r8,%rdx,2)
	addq	$1, %rdx
	cmpq	%rdx, %rcx
	jg	.L10
	vzeroupper
	popq	%rbx
	popq	%r12
	popq	%r13
	popq	%rbp
	.cfi_remember_state
	.cfi_def_cfa 7, 8
	ret
	.p2align 4,,10
	.p2align 3
.L31:
	.cfi_restore_state
	vmovq	%rax, %xmm7
	vcvtsd2ss	%xmm7, %xmm7, %xmm0
	jmp	.L14
	.p2align 4,,10
	.p2align 3
.L27:
	.cfi_def_cfa 7, 8
	.cfi_restore 3
	.cfi_restore 6
	.cfi_restore 12
	.cfi_restore 13
	ret
	.p2align 4,,10
	.p2align 3
.L24:
	vzeroupper
	ret
.L17:
	xorl	%esi, %esi
	xorl	%edx, %edx
	jmp	.L3
	.cfi_endproc
.LFE28:
	.size	_Z1fPKN1t7ElementINS_4bf16EEEPS2_ld, .-_Z1fPKN1t7ElementINS_4bf16EEEPS2_ld
	.section	.rodata.cst8,"aM",@progbits,8
	.align 8
.LC4:
	.long	0
	.long	988282880
	.align 8
.LC6:
	.long	0
	.long	-1159200768
	.align 8
.LC10:
	.long	0
	.long	940572672
	.section	.rodata
	.align 64
.LC11:
	.value	0
	.value	2
	.value	4
	.value	6
	.value	8
	.value	10
	.value	12
	.value	14
	.value	16
	.value	18
	.value	20
	.value	22
	.value	24
	.value	26
	.value	28
	.value	30
	.value	32
	.value	34
	.value	36
	.value	38
	.value	40
	.value	42
	.value	44
	.value	46
	.value	48
	.value	50
	.value	52
	.value	54
	.value	56
	.value	58
	.value	60
	.value	62
	.set	.LC23,.LC11
	.ident	"GCC: (Debian 12.2.0-14+deb12u1) 12.2.0"
	.section	.note.GNU-stack,"",@progbits
