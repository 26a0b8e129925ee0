;; Four rows of C = A B, or of C += A B: the inner loops of every product in core.js, which packs A and B beforehand.
;;
;;   A   (K, 4)          column k of the four rows, side by side
;;   B   (panels, K, 8)  panel by panel, 8 columns of row k side by side
;;   C   (4, ldc)        rows that are ldc bytes apart
;;
;; A number is a float32, a v128 holds four of them, and all addresses are in bytes. The eight sums of a panel stay in
;; registers: $c00 has row 0 and the left half of the panel, $c01 its right half, $c10 row 1, and so on.
(module
  (import "js" "memory" (memory 1))
  (func (export "block")
    (param $K i32) (param $panels i32) (param $A i32) (param $B i32) (param $C i32) (param $ldc i32) (param $add i32)
    (local $k i32) (local $a i32) (local $row1 i32) (local $row2 i32) (local $row3 i32)
    (local $left v128) (local $right v128) (local $x v128)
    (local $c00 v128) (local $c01 v128) (local $c10 v128) (local $c11 v128)
    (local $c20 v128) (local $c21 v128) (local $c30 v128) (local $c31 v128)
    (loop $next_panel
      ;; where the panel's four rows begin
      (local.set $row1 (i32.add (local.get $C) (local.get $ldc)))
      (local.set $row2 (i32.add (local.get $row1) (local.get $ldc)))
      (local.set $row3 (i32.add (local.get $row2) (local.get $ldc)))
      ;; the sums begin with C, or with 0
      (if (local.get $add)
        (then
          (local.set $c00 (v128.load (local.get $C))) (local.set $c01 (v128.load offset=16 (local.get $C)))
          (local.set $c10 (v128.load (local.get $row1))) (local.set $c11 (v128.load offset=16 (local.get $row1)))
          (local.set $c20 (v128.load (local.get $row2))) (local.set $c21 (v128.load offset=16 (local.get $row2)))
          (local.set $c30 (v128.load (local.get $row3))) (local.set $c31 (v128.load offset=16 (local.get $row3))))
        (else
          (local.set $x (v128.const i32x4 0 0 0 0))
          (local.set $c00 (local.get $x)) (local.set $c01 (local.get $x))
          (local.set $c10 (local.get $x)) (local.set $c11 (local.get $x))
          (local.set $c20 (local.get $x)) (local.set $c21 (local.get $x))
          (local.set $c30 (local.get $x)) (local.set $c31 (local.get $x))))
      (local.set $a (local.get $A))
      (local.set $k (local.get $K))
      (loop $next_k
        (local.set $left (v128.load (local.get $B)))
        (local.set $right (v128.load offset=16 (local.get $B)))
        ;; c_rj += a_rk b_kj, for row r = 0, 1, 2, 3: a_rk four times, times four columns
        (local.set $x (v128.load32_splat (local.get $a)))
        (local.set $c00 (f32x4.add (local.get $c00) (f32x4.mul (local.get $x) (local.get $left))))
        (local.set $c01 (f32x4.add (local.get $c01) (f32x4.mul (local.get $x) (local.get $right))))
        (local.set $x (v128.load32_splat offset=4 (local.get $a)))
        (local.set $c10 (f32x4.add (local.get $c10) (f32x4.mul (local.get $x) (local.get $left))))
        (local.set $c11 (f32x4.add (local.get $c11) (f32x4.mul (local.get $x) (local.get $right))))
        (local.set $x (v128.load32_splat offset=8 (local.get $a)))
        (local.set $c20 (f32x4.add (local.get $c20) (f32x4.mul (local.get $x) (local.get $left))))
        (local.set $c21 (f32x4.add (local.get $c21) (f32x4.mul (local.get $x) (local.get $right))))
        (local.set $x (v128.load32_splat offset=12 (local.get $a)))
        (local.set $c30 (f32x4.add (local.get $c30) (f32x4.mul (local.get $x) (local.get $left))))
        (local.set $c31 (f32x4.add (local.get $c31) (f32x4.mul (local.get $x) (local.get $right))))
        (local.set $B (i32.add (local.get $B) (i32.const 32)))
        (local.set $a (i32.add (local.get $a) (i32.const 16)))
        (br_if $next_k (local.tee $k (i32.sub (local.get $k) (i32.const 1)))))
      (v128.store (local.get $C) (local.get $c00)) (v128.store offset=16 (local.get $C) (local.get $c01))
      (v128.store (local.get $row1) (local.get $c10)) (v128.store offset=16 (local.get $row1) (local.get $c11))
      (v128.store (local.get $row2) (local.get $c20)) (v128.store offset=16 (local.get $row2) (local.get $c21))
      (v128.store (local.get $row3) (local.get $c30)) (v128.store offset=16 (local.get $row3) (local.get $c31))
      (local.set $C (i32.add (local.get $C) (i32.const 32)))
      (br_if $next_panel (local.tee $panels (i32.sub (local.get $panels) (i32.const 1)))))))
